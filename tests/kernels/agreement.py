"""Any module of kernels against `reference`, bit for bit, on cases made to be hard.

`CHECKS` are functions of (kernels, device, size): `size` is about how many coordinates the larger
cases have, so that slow machinery (an interpreter) can be given few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sparsewire import randomness
from sparsewire.kernels import Kernels, Selection, reference
from sparsewire.segments import Scope, Segments
from sparsewire.selectors import TopBlock
from sparsewire.shards import Shards
from sparsewire.workspace import Workspace

Check = Callable[[Kernels, torch.device, int], None]
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Share:
    """A share of every segment, with some room beyond it."""

    ratio: float
    slack: float = 0.0

    def entries(self, length: int) -> int:
        return min(length, max(1, math.ceil(self.ratio * length)))

    def capacity(self, length: int) -> int:
        return min(length, math.ceil(self.entries(length) * (1 + self.slack)))


def partition(
    shapes: Sequence[tuple[int, ...]],
    ratio: float,
    scope: Scope = "layer",
    dense_below: int = 0,
    slack: float = 0.0,
) -> Segments:
    named = {f"p{n}": shape for n, shape in enumerate(shapes)}
    return Segments.partition(named, Share(ratio, slack), scope, dense_below, dense_below > 0)


def layouts(size: int, slack: float = 0.0) -> dict[str, Segments]:
    """Ways to cut, by name."""
    side = max(2, math.isqrt(size // 3))
    layers = [(side, side), (side,), (7,), (side + 1, side), (1, 1), (side, 3), (5,)]
    return {
        "one segment": partition([(size + 1,)], 0.01, "global", slack=slack),
        "dense half": partition([(size // 2 + 3,)], 0.5, slack=slack),
        "nearly all": partition([(size // 2 + 1,), (9,)], 0.9, slack=slack),
        "layers, dense between": partition(layers, 0.02, dense_below=16, slack=slack),
        "layers, all sparse": partition(layers, 0.1, slack=slack),
        "global, dense behind": partition(layers, 0.02, "global", dense_below=16, slack=slack),
        "global over many spans": partition(layers, 0.01, "global", slack=slack),
        "chunks": partition([(size // 2 + 1,), (3, 70), (64,)], 0.03, 97, slack=slack),
        "tiny segments": partition([(3,), (2,), (5,)] * (size // 40 + 1), 0.3, slack=slack),
        "one element each": partition([(1,)] * 5, 0.5, slack=slack),
        "dense only": partition([(size // 4 + 1,), (3, 5)], 1.0, slack=slack),
        "empty spans": partition(
            [(0,), (side, side), (0, 3), (6,), (0,)], 0.05, dense_below=8, slack=slack
        ),
        "nothing but empty": partition([(0,), (0, 2)], 0.1, slack=slack),
        "nothing": partition([], 0.1, slack=slack),
    }


def normal(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def rows(size: int) -> dict[str, Tensor]:
    """Hard contents of a gradient, by name."""
    noise = normal(size)
    places = torch.arange(size)

    def at(every: int, value: float, base: Tensor = noise) -> Tensor:
        return torch.where(places % every == every // 2, torch.tensor(value), base)

    return {
        "normal": noise,
        "zeros": torch.zeros(size),
        "negative zeros": torch.full((size,), -0.0),
        "one magnitude": noise.sign() * 0.75,
        "two magnitudes": torch.where(noise > 2, 1.0, 0.5),
        "ties at the edge": (noise * 4).round() / 4,
        "denormals": noise * 1e-40,
        "denormals and zeros": at(3, 0.0, noise * 1e-42),
        "few are not zero": at(101, 3.0, torch.zeros(size)),
        "heavy tail": noise / (normal(size, 1).abs() + 1e-6),
        "ascending": places.float(),
        "descending": places.flip(0).float(),
        "one spike": at(max(1, size), 1e30),
        "huge": noise.sign() * 3e38,
        "a NaN": at(max(1, size), math.nan),
        "NaNs": at(37, math.nan),
        "infinities": at(41, -math.inf),
        "NaNs and infinities": at(29, math.nan, at(13, math.inf)),
        "only NaN": torch.full((size,), math.nan),
        "at the end": torch.where(places == size - 1, -math.inf, noise),
    }


def courses(size: int) -> dict[str, list[Tensor]]:
    """Gradients of several steps that mislead whoever guesses from the step before."""
    noise = [normal(size, seed) for seed in range(4)]
    ramp = torch.arange(size) / max(1, size)
    some = rows(size)
    return {
        "steady": noise,
        "a thousand times larger": [noise[0], 1000 * noise[1], 1e6 * noise[2]],
        "a thousand times smaller": [noise[0], noise[1] / 1000, noise[2] * 1e-8],
        "to and fro": [noise[0], 1000 * noise[1], noise[2], 1e5 * noise[3], noise[0]],
        "shifted support": [noise[0] * (ramp < 0.3), 50 * noise[1] * (ramp > 0.7), noise[2]],
        "begins with nothing": [some["zeros"], some["zeros"], noise[0], noise[1]],
        "ends with nothing": [noise[0], -noise[0], some["zeros"]],
        "through ties": [noise[0], some["one magnitude"], some["two magnitudes"], noise[1]],
        "through denormals": [some["denormals"], noise[1], some["denormals"]],
        "through NaN": [noise[0], some["NaNs"], noise[1]],
        "through infinity": [some["infinities"], noise[0], noise[1]],
    }


def same(expected: Tensor, got: Tensor, what: str) -> None:
    """The same bits; any NaN is as good as another."""
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, not {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)}, not {tuple(expected.shape)}"
    got, expected = got.detach().cpu(), expected.cpu()
    if expected.is_floating_point():
        words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
        agree = (got.contiguous().view(words) == expected.contiguous().view(words)) | (
            got.isnan() & expected.isnan()
        )
    else:
        agree = got == expected
    if not agree.all():
        places = (~agree).view(-1).nonzero().view(-1)[:5].tolist()
        theirs = [got.view(-1)[p].item() for p in places]
        ours = [expected.view(-1)[p].item() for p in places]
        raise AssertionError(f"{what}: at {places} {theirs}, and the reference has {ours}")


def same_squares(addend: Tensor, got: Tensor, segments: Segments, what: str) -> None:
    """About the sum of squares of every span, where float32 can hold it."""
    assert got.dtype == torch.float64
    assert got.shape == (len(segments.params),)
    exact = addend.double().square()
    for number, param in enumerate(segments.params):
        expected, value = float(exact[param.start : param.stop].sum()), float(got[number])
        if not math.isfinite(expected):
            assert not math.isfinite(value), what
        elif expected < 1e37:
            assert math.isclose(value, expected, rel_tol=1e-4, abs_tol=1e-37 * param.length), what


Step = Callable[[Kernels, Tensor | None, Tensor, Tensor, Workspace], Selection]


@dataclass
class Pair:
    """One residual with the kernels under test and one with the reference, step after step.

    All results are kept and compared at the end: a later step must not overwrite an earlier one's.
    """

    kernels: Kernels
    device: torch.device
    segments: Segments
    what: str
    keeps: bool = True
    work: Workspace = field(default_factory=Workspace)

    def __post_init__(self) -> None:
        size = self.segments.size
        self._theirs = [torch.zeros(size + 1, device=self.device) for _ in range(2)]
        self._ours = [torch.zeros(size + 1) for _ in range(2)]
        self._seen: list[tuple[Selection, Selection, Tensor, Tensor, Tensor]] = []

    def step(self, addend: Tensor, call: Step) -> None:
        there = addend.to(self.device)
        kept = self._theirs[0].clone()
        before, after = self._theirs
        theirs = call(self.kernels, before if self.keeps else None, there, after, self.work)
        same(kept, self._theirs[0], f"{self.what}: before")
        same(addend, there, f"{self.what}: addend")
        before, after = self._ours
        ours = call(reference, before if self.keeps else None, addend, after, self.work)
        self._seen.append((ours, theirs, addend, self._ours[1].clone(), self._theirs[1].clone()))
        self._theirs.reverse()
        self._ours.reverse()

    def compare(self) -> None:
        for number, (ours, theirs, addend, our_after, their_after) in enumerate(self._seen):
            what = f"{self.what}, step {number}"
            same(ours.indices, theirs.indices, f"{what}: indices")
            same(ours.values, theirs.values, f"{what}: values")
            same(our_after, their_after, f"{what}: after")
            same(ours.non_finite, theirs.non_finite, f"{what}: non-finite")
            assert int(ours.count) == int(theirs.count), f"{what}: count"
            same_squares(addend, theirs.squares, self.segments, f"{what}: squares")


Call = Callable[[Kernels, Tensor | None, Tensor, Tensor, Segments, int, Workspace], Selection]


def compare_withdrawals(
    kernels: Kernels, device: torch.device, size: int, call: Call, slack: float = 0.0
) -> None:
    """All layouts with all rows, with half-precision addends, and with misleading courses."""
    for where, segments in layouts(size, slack).items():
        work = Workspace()  # so that guesses from elsewhere are left in it
        for name, row in rows(segments.size).items():
            what = f"{where}, {name}"
            pair = Pair(kernels, device, segments, what, work=work)
            memoryless = Pair(kernels, device, segments, f"{what}, no memory", False, work)
            for number, addend in enumerate((row, row.flip(0))):
                _step(pair, addend, call, number)
                _step(memoryless, addend, call, number)
            pair.compare()
            memoryless.compare()
    for dtype in HALVES:
        for where, segments in layouts(size, slack).items():
            work = Workspace()
            hard = rows(segments.size)
            for name in ("normal", "ties at the edge", "denormals", "heavy tail", "NaNs", "huge"):
                for keeps in (True, False):
                    pair = Pair(kernels, device, segments, f"{where}, {name}, {dtype}", keeps, work)
                    for number in range(2):
                        _step(pair, hard[name].to(dtype), call, number)
                    pair.compare()
    for where, segments in layouts(size, slack).items():
        work = Workspace()
        for name, course in courses(segments.size).items():
            pair = Pair(kernels, device, segments, f"{where}, {name}", work=work)
            for number, addend in enumerate(course):
                _step(pair, addend, call, number)
            pair.compare()


def _step(pair: Pair, addend: Tensor, call: Call, number: int) -> None:
    def on(
        kernels: Kernels, before: Tensor | None, addend: Tensor, after: Tensor, work: Workspace
    ) -> Selection:
        return call(kernels, before, addend, after, pair.segments, number, work)

    pair.step(addend, on)


def check_top_k(kernels: Kernels, device: torch.device, size: int) -> None:
    compare_withdrawals(kernels, device, size, _top_k)


def _top_k(
    kernels: Kernels,
    before: Tensor | None,
    addend: Tensor,
    after: Tensor,
    cut: Segments,
    _: int,
    work: Workspace,
) -> Selection:
    return kernels.top_k(before, addend, after, cut, work)


def check_over_threshold(kernels: Kernels, device: torch.device, size: int) -> None:
    compare_withdrawals(kernels, device, size, _over_threshold, slack=0.25)


def check_small_samples(kernels: Kernels, device: torch.device, size: int) -> None:
    """Samples that mislead: far more hits than there is room for, or far fewer."""
    for where, segments in layouts(size, 0.1).items():
        for sample in (1, 7, 50):
            pair = Pair(kernels, device, segments, f"{where}, a sample of {sample}")
            for key in range(4):

                def call(
                    kernels: Kernels,
                    before: Tensor | None,
                    addend: Tensor,
                    after: Tensor,
                    work: Workspace,
                    segments: Segments = segments,
                    sample: int = sample,
                    key: int = key,
                ) -> Selection:
                    return kernels.over_threshold(
                        before, addend, after, segments, sample, key, work
                    )

                pair.step(normal(segments.size, key), call)
            pair.compare()


def _over_threshold(
    kernels: Kernels,
    before: Tensor | None,
    addend: Tensor,
    after: Tensor,
    cut: Segments,
    key: int,
    work: Workspace,
) -> Selection:
    return kernels.over_threshold(before, addend, after, cut, max(10, cut.size // 10), key, work)


def check_chosen(kernels: Kernels, device: torch.device, size: int) -> None:
    compare_withdrawals(kernels, device, size, _randomly_chosen)


def _randomly_chosen(
    kernels: Kernels,
    before: Tensor | None,
    addend: Tensor,
    after: Tensor,
    cut: Segments,
    key: int,
    work: Workspace,
) -> Selection:
    draw = kernels.random_k if key % 2 else kernels.block_random_k
    return kernels.chosen(before, addend, after, cut, draw(cut, key, after.device, work), work)


def check_chosen_nowhere(kernels: Kernels, device: torch.device, size: int) -> None:
    """Unused slots and no slots at all."""
    segments = partition([(size, 2), (5,)], 0.01, dense_below=10)
    for places in ([0, 3, segments.size, segments.size], [], [2 * size - 1]):
        indices = torch.tensor(places, dtype=torch.int64)
        pair = Pair(kernels, device, segments, f"chosen {places}")

        def call(
            kernels: Kernels,
            before: Tensor | None,
            addend: Tensor,
            after: Tensor,
            work: Workspace,
            indices: Tensor = indices,
        ) -> Selection:
            return kernels.chosen(before, addend, after, segments, indices.to(after.device), work)

        for seed in range(2):
            pair.step(normal(segments.size, seed), call)
        pair.compare()


KEYS = (0, 1, -1, 12345, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))


def check_random_k(kernels: Kernels, device: torch.device, size: int) -> None:
    work = Workspace()
    for where, segments in layouts(size).items():
        for key in KEYS:
            expected = reference.random_k(segments, key, torch.device("cpu"), work)
            same(expected, kernels.random_k(segments, key, device, work), f"{where}, key {key}")


def check_block_random_k(kernels: Kernels, device: torch.device, size: int) -> None:
    work = Workspace()
    for where, segments in layouts(size).items():
        for key in (*KEYS, *range(2, 12)):
            expected = reference.block_random_k(segments, key, torch.device("cpu"), work)
            found = kernels.block_random_k(segments, key, device, work)
            same(expected, found, f"{where}, key {key}")


def messages(segments: Segments, count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """What `count` ranks might send: some slots unused, zeros and negative zeros among them."""
    made = []
    for rank in range(count):
        indices = reference.random_k(segments, seed + rank, torch.device("cpu"), Workspace())
        unused = indices.numel() // 5 if rank % 2 else 0
        if unused:
            indices[-unused:] = segments.size
        values = normal(indices.numel() + segments.dense_size, seed + rank)
        values[::7] = -0.0
        values[indices.numel() - unused : indices.numel()] = 5.0
        made.append((indices, values))
    return made


def block_layouts(size: int) -> dict[str, tuple[Segments, int]]:
    """Ways to cut into blocks, by name: the segments, and the length of a block."""
    found = {}
    for block in (1, 3, 8, 64, 100):
        selector = TopBlock(0.1, block=block)
        side = max(2, math.isqrt(size // 3))
        layers = [(side, side), (side,), (7,), (side + 1, side), (1, 1), (side, 3), (0,), (5,)]
        named = {f"p{n}": shape for n, shape in enumerate(layers)}
        for scope, below in (("layer", 16), ("layer", 0), ("global", 16), (2 * block + 1, 4)):
            segments = Segments.partition(named, selector, scope, below, below > 0)  # type: ignore[arg-type]
            found[f"{block}, {scope}, {below}"] = segments, block
        found[f"{block}, no rest"] = (
            Segments.partition({"x": (20 * block,)}, selector, dense_below=0, dense_1d=False),
            block,
        )
        found[f"{block}, nothing"] = Segments.partition({}, selector), block
    return found


def check_blocks(kernels: Kernels, device: torch.device, size: int) -> None:
    """Norms bit for bit, and the blocks chosen by them; by sums over ranks of any kind, too."""
    work = Workspace()
    for name, (segments, block) in block_layouts(min(size, 20_000)).items():
        for what, row in rows(segments.size).items():
            before = torch.cat([normal(segments.size, 3), torch.zeros(1)])
            for kept in (None, before):
                for dtype in (torch.float32, *HALVES):
                    if dtype != torch.float32 and what not in ("normal", "NaNs", "infinities"):
                        continue
                    addend = row.to(dtype)
                    wanted = reference.block_norms(kept, addend, segments, block, work)
                    moved = None if kept is None else kept.to(device)
                    got = kernels.block_norms(moved, addend.to(device), segments, block, work)
                    same(wanted, got, f"{name}, {what}, {dtype}")
                    for norms in (wanted, wanted * 1e-30, wanted - 1):
                        chosen = reference.top_blocks(norms, segments, block, work)
                        same(
                            chosen,
                            kernels.top_blocks(norms.to(device), segments, block, work),
                            f"blocks of {name}, {what}, {dtype}",
                        )


def check_add_up(kernels: Kernels, device: torch.device, size: int) -> None:
    work = Workspace()
    # shards sum the selected entries alone: then dense tensors belong to no segment
    selected = {f"{k}, only selected": replace(v, dense=()) for k, v in layouts(size).items()}
    for where, segments in (layouts(size) | selected).items():
        for count in (0, 1, 2, 5):
            sent = messages(segments, count)
            there = [(indices.to(device), values.to(device)) for indices, values in sent]
            for share in (1.0, 1 / 3):
                ours = torch.full((segments.size,), math.nan)
                theirs = ours.to(device).clone()
                reference.add_up(ours, sent, share, segments, work)
                kernels.add_up(theirs, there, share, segments, work)
                same(ours, theirs, f"{where}, {count} messages, share {share}")


def check_put_back(kernels: Kernels, device: torch.device, size: int) -> None:
    work = Workspace()
    for where, segments in layouts(size).items():
        for indices, errors in messages(segments, 3):
            ours = torch.cat([normal(segments.size, 9), torch.zeros(1)])
            theirs = ours.to(device).clone()
            reference.put_back(ours, indices, errors, segments, work)
            kernels.put_back(theirs, indices.to(device), errors.to(device), segments, work)
            same(ours, theirs, where)


def check_pack(kernels: Kernels, device: torch.device, size: int) -> None:
    """All widths, all remainders of eight, and bits above the width that are to be cut off."""
    generator = torch.Generator().manual_seed(0)
    for width in (*range(1, 18), 24, 31, 33, 40, 62):
        for count in (0, 1, 7, 8, 9, 63, 64, 65, size):
            numbers = torch.randint(-(2**62), 2**62, (count,), generator=generator)
            ours = reference.pack(numbers, width)
            theirs = kernels.pack(numbers.to(device), width)
            same(ours, theirs, f"pack {count} of width {width}")
            same(
                reference.unpack(ours, count, width),
                kernels.unpack(theirs, count, width),
                f"unpack {count} of width {width}",
            )


def check_unpack_random_bytes(kernels: Kernels, device: torch.device, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for width in range(1, 17):
        for count in (0, 1, 8, 13, size):
            data = torch.randint(
                0, 256, (-(-count // 8) * width,), dtype=torch.uint8, generator=generator
            )
            same(
                reference.unpack(data, count, width),
                kernels.unpack(data.to(device), count, width),
                f"unpack {count} of width {width}",
            )


def check_set_flags(kernels: Kernels, device: torch.device, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (0, 1, 7, 8, 9, 63, 64, 65, size):
        for share in (0.0, 0.1, 0.5, 1.0):
            flags = torch.rand(count, generator=generator) < share
            beyond = torch.tensor([-(-count // 8) * 8, count + 100, 2**40])
            places = flags.nonzero().squeeze(1)
            mixed = torch.cat([places, beyond, places.flip(0), places[::3]])  # some repeatedly
            plain = torch.cat([places, beyond])
            assert torch.equal(reference.set_flags(mixed, count), reference.set_flags(plain, count))
            same(
                reference.set_flags(plain, count),
                kernels.set_flags(mixed.to(device), count),
                f"{count} flags, {share} of them set",
            )


def check_find_flags(kernels: Kernels, device: torch.device, size: int) -> None:
    """Random bytes, with more and fewer flags set than are asked for."""
    generator = torch.Generator().manual_seed(0)
    for length in (0, 1, 7, 8, 9, 100, size // 8):
        for bits in (0, 1, 3, 128, 255):
            data = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator) & bits
            for count in (0, 1, 8, length, 8 * length, 8 * length + 5):
                same(
                    reference.find_flags(data, count),
                    kernels.find_flags(data.to(device), count),
                    f"{count} flags in {length} bytes & {bits}",
                )


def check_ascending(kernels: Kernels, device: torch.device, size: int) -> None:
    """What is written and read back, and read of bytes that nobody wrote."""
    generator = torch.Generator().manual_seed(0)
    for where, segments in layouts(size).items():
        if not segments.capacity:
            continue
        for width in (0, 1, 6, 8, 9, 17):
            case = f"{where}, width {width}"
            for indices, _ in messages(segments, 2):
                ours = reference.write_ascending(indices, width, segments)
                theirs = kernels.write_ascending(indices.to(device), width, segments)
                same(ours, theirs, f"written, {case}")
                same(indices, kernels.read_ascending(theirs, width, segments), f"read, {case}")
            for bits in (0, 1, 17, 255):
                data = torch.randint(0, 256, ours.shape, dtype=torch.uint8, generator=generator)
                data &= bits
                same(
                    reference.read_ascending(data, width, segments),
                    kernels.read_ascending(data.to(device), width, segments),
                    f"bytes & {bits}, {case}",
                )


def check_narrow(kernels: Kernels, device: torch.device, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    largest = torch.finfo(torch.float32).max
    for length in (0, 1, 3, 4, 5, size):
        wide = torch.randn(length, generator=generator) * 10 ** torch.randn(length)
        wide[::7] = largest
        wide[1::7] = 1e-45
        wide[2::7] = -0.0
        for key in KEYS:
            expected, found = (torch.empty(length, dtype=torch.bfloat16) for _ in range(2))
            found = found.to(device)
            reference.narrow(wide, expected, key)
            kernels.narrow(wide.to(device), found, key)
            same(expected.view(torch.int16), found.view(torch.int16), f"{length}, key {key}")


def check_fit_magnitudes(kernels: Kernels, device: torch.device, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for counts in ([size], [0, 7, 0, size // 2, 1], [3, 2], [1], [0]):
        total = sum(counts)
        for padding in (0, counts[-1] // 2):
            values = torch.randn(total, generator=generator) ** 5
            values[total - padding :] = 0
            shares = [*counts[:-1], counts[-1] - padding]
            for scale in (1.0, 0.0, 1e-42, 1e38):
                scaled = (values * scale).clamp(-3e38, 3e38)
                tables = torch.tensor(counts), torch.tensor(shares)
                for levels in (2, 4, 128):
                    case = f"{counts}, {padding} of them padding, times {scale}, {levels} levels"
                    wanted = reference.fit_magnitudes(scaled, *tables, levels)
                    moved = [table.to(device) for table in tables]
                    found = kernels.fit_magnitudes(scaled.to(device), *moved, levels)
                    assert (wanted[0].diff(dim=0) >= 0).all(), case
                    for ours, theirs in zip(wanted, found, strict=True):
                        same(ours, theirs, case)


def check_digest(kernels: Kernels, device: torch.device, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for length in (0, 8, 16, 64, 72, size // 8 * 8):
        data = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
        for key in KEYS:
            same(
                reference.checksum(data, key),
                kernels.checksum(data.to(device), key),
                f"{length} bytes, key {key}",
            )


def ascending_cases(size: int) -> Iterator[list[int]]:
    yield []
    for first in (-1, 0, size - 1, size, size + 1):
        yield [first]
        for second in (-(2**62), -1, 0, 1, size - 1, size, size + 1, 2**62):
            yield [first, second]
            yield [0, 2, first, second, size, size]
    yield list(range(size))
    yield [*range(size), size, size, size]
    yield [*range(size - 1), 0]
    yield [*range(size // 2), size, *range(size // 2, size)]


def check_is_ascending(kernels: Kernels, device: torch.device, size: int) -> None:
    for row in ascending_cases(size):
        indices = torch.tensor(row, dtype=torch.int64)
        same(
            reference.is_ascending(indices, size),
            kernels.is_ascending(indices.to(device), size),
            f"{row[:6]}… of {size}",
        )


def check_inspect(kernels: Kernels, device: torch.device, size: int) -> None:
    """A fine message, and others that are not, each in its way; then some that are too short."""
    generator = torch.Generator().manual_seed(size)
    values = normal(size + 3)
    bodies = torch.randint(0, 256, (5, 8 * size + 8), dtype=torch.uint8, generator=generator)
    messages, entries = [], []
    for number, body in enumerate(bodies):
        checksum = reference.checksum(body[:-8], randomness.join(7, number + 2))
        body[-8:] = checksum.view(1).view(torch.uint8)
        messages.append(body)
        entries.append((torch.arange(0, 2 * size, 2), values.clone()))
    messages[1][size // 2] ^= 4
    entries[2][0][size // 2] = 2**40
    entries[3][1][-1] = math.inf
    entries[3][0][-1] = 0
    entries[4][1][0] = math.nan
    for lengths in ([8 * size + 8] * 5, [8 * size + 8] * 4 + [8], [8 * size] * 5):
        sent = [message[-length:] for message, length in zip(messages, lengths, strict=True)]
        theirs = [message.to(device) for message in sent]
        moved = [(i.to(device), v.to(device)) for i, v in entries]
        for rest in ((7, 2, 8 * size + 8, 2 * size), (7, 3, 8 * size + 8, 2 * size)):
            same(
                reference.inspect(sent, entries, *rest),
                kernels.inspect(theirs, moved, *rest),
                f"{lengths}, {rest}",
            )


WITHDRAWALS: tuple[Check, ...] = (
    check_top_k,
    check_over_threshold,
    check_small_samples,
    check_chosen,
    check_chosen_nowhere,
)


def check_deal(kernels: Kernels, device: torch.device, size: int) -> None:
    work = Workspace()
    for segments in layouts(size, slack=0.25).values():
        for world_size, clustered in ((1, False), (3, False), (8, True)):
            shards = Shards(segments, world_size, clustered=clustered)
            hits = [torch.arange(p.start, p.stop)[: p.count] for p in segments.sparse]
            spread = reference.random_k(segments, 5, torch.device("cpu"), work)
            filled = torch.full((segments.capacity - spread.numel(),), segments.size)
            for indices in (torch.cat([*hits, spread[:0]]), torch.cat([spread, filled])):
                wanted = reference.deal(indices, shards, work)
                found = kernels.deal(indices.to(device), shards, work)
                for one, other in zip(wanted, found, strict=True):
                    assert torch.equal(one, other.cpu())


def check_collect(kernels: Kernels, device: torch.device, size: int) -> None:
    work = Workspace()
    for segments in layouts(size).values():
        shards = Shards(segments, 3)
        for owner in range(3):
            places = torch.arange(-1, shards.part(owner).size + 2)
            places = torch.cat([places, places.flip(0)])  # as only damage can make them
            wanted = reference.collect(places, owner, shards, work)
            found = kernels.collect(places.to(device), owner, shards, work)
            assert torch.equal(wanted, found.cpu())


CHECKS: tuple[Check, ...] = (
    check_deal,
    check_collect,
    *WITHDRAWALS,
    check_random_k,
    check_block_random_k,
    check_blocks,
    check_add_up,
    check_put_back,
    check_pack,
    check_unpack_random_bytes,
    check_set_flags,
    check_find_flags,
    check_ascending,
    check_narrow,
    check_fit_magnitudes,
    check_digest,
    check_is_ascending,
    check_inspect,
)
