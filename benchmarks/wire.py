"""What travels, to the bit, and what coding it costs: each figure beside its floor and its peers.

    python benchmarks/wire.py [--size 10e6] [--repeats 31] [--save]

Times are medians of interleaved repeats on one thread, as multiples of a copy of the float32
gradient in the same run. Every target prints PASS or FAIL. `--save` also writes all of it to
benchmarks/results/wire.txt, with machine, versions and commit.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial

import torch
from measure import RESULTS, ROOT, Page, machine, median_times
from torch import nn

import sparsewire as sw
from sparsewire import kernels
from sparsewire.codecs import IndexCodec
from sparsewire.collectives import Transfer
from sparsewire.collectives.all_gather import AllGatherPlan
from sparsewire.counters import Counters
from sparsewire.exchange import Call, Exchange
from sparsewire.kernels.reference import finite
from sparsewire.message import FINE, HEADER_BYTES, STATUS_BYTES, add_checksum, matches_checksum
from sparsewire.randomness import RandomKey
from sparsewire.segments import Segments
from sparsewire.selectors import NO_STATE, Accumulation
from sparsewire.state import RESIDUAL, StepState
from sparsewire.tools.tasks import mnist
from sparsewire.workspace import Workspace

COLUMNS = 1000
# Published formats. Bits per index; a Bloom filter's follow from the ratio, this is for 1 %.
PEERS = "64 int64 (DeMo), 32 int32 (GRACE, DGC), 12 in chunks of 4096 (SparseLoCo)"
BLOOM = "14.4 Bloom filter (DeepReduce)"

page = Page()
say, target = page.say, page.target


def entropy(length: int, count: int) -> float:
    """log2 of the number of ways to choose `count` of `length`: the floor for random supports."""
    ways = math.lgamma(length + 1) - math.lgamma(count + 1) - math.lgamma(length - count + 1)
    return ways / math.log(2)


def cut(ratio: float, size: int) -> tuple[sw.Scheme, Segments]:
    scheme = sw.Scheme(sw.TopK(ratio), dense_below=0, dense_1d=False)
    return scheme, scheme.partition({"w": (size // COLUMNS, COLUMNS)})


def support(segments: Segments) -> torch.Tensor:
    """As many random coordinates as the segments have room for, ascending."""
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(segments.size, generator=generator)[: segments.capacity].sort().values


def bits_per_index(codec: IndexCodec, indices: torch.Tensor, segments: Segments) -> float:
    """Measured on written bytes that were read back."""
    data = codec.encode(indices, segments)
    assert torch.equal(codec.decode(data, segments), indices)
    return 8 * data.numel() / indices.numel()


def index_row(
    name: str, scheme: sw.Scheme, segments: Segments, indices: torch.Tensor, peers: str
) -> dict[str, float]:
    codecs: tuple[IndexCodec, ...] = (
        sw.EliasFano(),
        sw.Bitmap(),
        sw.Int32(),
        scheme.indices,
    )
    figures = [bits_per_index(codec, indices, segments) for codec in codecs]
    floor = sum(entropy(p.length, p.count) for p in segments.sparse) / segments.capacity
    say(
        f"  {name:<22} {figures[0]:9.3f} {figures[1]:9.3f} {figures[2]:7.1f} {figures[3]:9.3f} "
        f"{scheme.indices!r:<11} {floor:7.3f} {100 * (figures[3] / floor - 1):+6.1f} %  {peers}"
    )
    return {
        "elias": figures[0],
        "bitmap": figures[1],
        "default": figures[3],
    }


def mnist_gradient() -> tuple[dict[str, tuple[int, ...]], dict[str, torch.Tensor]]:
    """The gradient of the demo's network on its first real batch."""
    data = mnist.load(mnist.find(ROOT / "data" / "mnist"), limit=4096)
    model = mnist.build((256, 256), seed=0)
    images, labels = data.train.batch(mnist.order(0, 0, len(data.train))[:64])
    nn.functional.cross_entropy(model(images), labels).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: tuple(g.shape) for name, g in gradients.items()}, gradients


def index_sizes(size: int) -> None:
    say("Bits per index (floor: log2 C(n, k) / k of every segment, what random supports need)")
    say(
        f"  {'support':<22} {'EliasFano':>9} {'Bitmap':>9} {'Int32':>7} {'default':>9} "
        f"{'is':<11} {'floor':>7} {'over':>8}  published peers"
    )
    found = {}
    for ratio in (0.1, 0.01, 0.001):
        scheme, segments = cut(ratio, size)
        peers = f"{PEERS}, {BLOOM}" if ratio == 0.01 else PEERS
        name = f"random {100 * ratio:g} % of {size / 1e6:g}M"
        found[ratio] = index_row(name, scheme, segments, support(segments), peers)
    shapes, gradients = mnist_gradient()
    scheme = sw.Scheme(sw.TopK(0.01))
    segments = scheme.partition(shapes)
    flat = torch.cat([gradients[span.name].reshape(-1) for span in segments.params])
    accumulation = Accumulation(None, flat, torch.zeros(flat.numel() + 1))
    key, work = RandomKey(0, 0, 0), Workspace()
    indices = scheme.selector.select(accumulation, segments, key, NO_STATE, work).indices
    index_row(f"MNIST 1 % of {flat.numel() / 1e6:.2f}M", scheme, segments, indices, PEERS)
    target("indices at 1 %", found[0.01]["default"], 8.6, "bits")
    target("indices at 0.1 %", found[0.001]["default"], 12.0, "bits")
    dense = found[0.1]
    target(
        "indices at 10 %, no worse than bitmap or Elias–Fano",
        dense["default"],
        min(dense["bitmap"], dense["elias"]),
        "bits",
    )


def two_ranks(scheme: sw.Scheme, size: int) -> tuple[AllGatherPlan, Transfer, Transfer]:
    """The protocol between two ranks, and each one's exchange under way."""
    exchange = Exchange(scheme, scheme.partition({"w": (size // COLUMNS, COLUMNS)}), 2)
    assert isinstance(exchange.plan, AllGatherPlan)

    def transfer(rank: int) -> Transfer:
        return Transfer(
            exchange.context(Call(0, rank)),
            RandomKey(scheme.seed, 0, rank),
            2,
            torch.zeros(size),
            StepState({}, {RESIDUAL: torch.zeros(size + 1)}),
            [],
            Counters(),
            Workspace(),
            torch.tensor(FINE),
        )

    return exchange.plan, transfer(0), transfer(1)


def message_sizes(size: int) -> None:
    say()
    say(f"Bits per parameter of TopK(0.01) at {size / 1e6:g}M: message, header and status")
    say(f"  {'values':<12} {'bits':>8} {'bytes':>10} {'below fp32':>11} {'below bf16':>11}")
    values = torch.randn(size // 100, generator=torch.Generator().manual_seed(1))
    found = {}
    for codec in (sw.Float32(), sw.BFloat16(), sw.TwoBit(), sw.OneBit()):
        plan, sender, _ = two_ranks(
            sw.Scheme(sw.TopK(0.01), values=codec, dense_below=0, dense_1d=False), size
        )
        message, _ = plan.encode((support(plan.layout.segments), values), sender)
        nbytes = message.numel() + HEADER_BYTES + STATUS_BYTES
        bits = found[repr(codec)] = 8 * nbytes / size
        say(f"  {codec!r:<12} {bits:8.4f} {nbytes:10,} {32 / bits:10.1f}x {16 / bits:10.1f}x")
    say(
        "  peers: 32 fp32, 16 the bf16 and fp16 hooks, "
        "0.64 top-k 1 % with int32 and fp32 (GRACE, DGC)"
    )
    target("TwoBit", found["TwoBit()"], 0.108, "bits per parameter")


def index_times(size: int, repeats: int) -> None:
    _, segments = cut(0.01, size)
    indices = support(segments)
    source = torch.randn(size)
    copy = torch.empty_like(source)
    jobs: dict[str, Callable[[], object]] = {"copy": lambda: copy.copy_(source)}
    codecs: tuple[IndexCodec, ...] = (sw.EliasFano(), sw.Int32())
    for codec in codecs:
        data = codec.encode(indices, segments)
        jobs[f"{codec!r} encode"] = partial(codec.encode, indices, segments)
        jobs[f"{codec!r} decode"] = partial(codec.decode, data, segments)
    times = median_times(jobs, repeats)
    one = times["copy"]
    say()
    say(f"Time of the indices at 1 % of {size / 1e6:g}M, one thread; one copy = {1e3 * one:.2f} ms")
    say(f"  {'codec':<12} {'encode':>8} {'decode':>8} {'both':>8}  copies   ns per index")
    for codec in codecs:
        parts = [times[f"{codec!r} {way}"] for way in ("encode", "decode")]
        say(
            f"  {codec!r:<12} {parts[0] / one:8.3f} {parts[1] / one:8.3f} {sum(parts) / one:8.3f}"
            f"         {1e9 * sum(parts) / len(indices):6.1f}"
        )
    both = times["EliasFano() encode"] + times["EliasFano() decode"]
    target("EliasFano encode + decode, under one copy", both / one, 1.0, "copies")


def check_times(size: int, repeats: int) -> None:
    say()
    say("Checks of one message at 1 %: checksum written, checksum read, indices, finite values.")
    say("Encode is from the gradient to the message, decode from the message to the mean.")
    say(
        f"  {'values':<12} {'select':>7} {'write':>7} {'open':>7} {'apply':>7} {'seal':>7} "
        f"{'unseal':>7} {'indices':>8} {'finite':>7}  ms   of write + open, of encode + decode"
    )
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(1))
    accumulation = Accumulation(torch.zeros(size + 1), gradient, torch.zeros(size + 1))
    shares = {}
    kernel = kernels.on(gradient.device)
    for codec in (sw.Float32(), sw.BFloat16(), sw.TwoBit(), sw.OneBit()):
        scheme = sw.Scheme(sw.TopK(0.01), values=codec, dense_below=0, dense_1d=False)
        plan, sender, receiver = two_ranks(scheme, size)
        segments = plan.layout.segments

        draw, work = RandomKey(0, 0, 0), Workspace()
        select = partial(scheme.selector.select, accumulation, segments, draw, NO_STATE, work)
        taken = select()
        indices, values = entries = taken.indices, taken.values
        message, own = plan.encode(entries, sender)
        open_one = partial(plan.decode, [message, message], own, receiver)  # only the first is read
        assert torch.equal(open_one()[0][1], own[1])
        assert int(receiver.corruption) == FINE
        key = sender.context.key(0)
        jobs: dict[str, Callable[[], object]] = {
            "select": select,
            "write": partial(plan.encode, entries, sender),
            "open": open_one,
            "apply": partial(kernel.add_up, sender.gradient, [own], 1.0, segments, work),
            "seal": partial(add_checksum, message, key),
            "unseal": partial(matches_checksum, message, key),
            "indices": partial(kernel.is_ascending, indices, size),
            "finite": partial(finite, values),
        }
        times = median_times(jobs, repeats)
        coding = times["write"] + times["open"]
        checks = sum(times[name] for name in ("seal", "unseal", "indices", "finite"))
        whole = coding + times["select"] + times["apply"]
        shares[repr(codec)] = 100 * checks / (whole - checks)
        columns = " ".join(
            f"{1e3 * times[name]:{width}.3f}"
            for name, width in zip(jobs, (7, 7, 7, 7, 7, 7, 8, 7), strict=True)
        )
        narrow = 100 * checks / (coding - checks)
        say(f"  {codec!r:<12} {columns}       {narrow:.1f} %, {shares[repr(codec)]:.1f} %")
    for name, share in shares.items():
        target(f"checks with {name}", share, 5.0, "% of encode + decode")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", type=float, default=10e6)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = round(options.size / COLUMNS / 100) * COLUMNS * 100
    say(machine())
    say()
    index_sizes(size)
    message_sizes(size)
    index_times(size, options.repeats)
    check_times(size, options.repeats)
    if options.save:
        page.save(RESULTS / "wire.txt")


if __name__ == "__main__":
    main()
