"""Value codecs: casts round to the nearest; a few bits follow their formulas."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

import sparsewire as sw
from sparsewire.codecs import Place, ValueCodec
from sparsewire.segments import Segments
from sparsewire.workspace import Workspace

from ..laws.cases import LAWFUL, alone, examples, is_cast, label, rolls_dice

CASTS = [codec for codec in examples("values") if is_cast(codec)]
QUANTIZED = [codec for codec in examples("values") if not is_cast(codec)]
STEADY = [codec for codec in QUANTIZED if not rolls_dice(codec)]
LIMIT = torch.finfo(torch.float32).max


def place_of(count: int, key: int = 0) -> Place:
    """Room for this many values of one segment."""
    return Place(torch.arange(count), alone(sw.TopK(count=count), count + 1), key, Workspace())


def through(codec: ValueCodec, values: Tensor, place: Place | None = None, key: int = 0) -> Tensor:
    """The values as they are read."""
    place = place or place_of(values.numel(), key)
    return codec.decode(codec.encode(values, place), place, values.dtype)


@pytest.mark.parametrize(
    ("codec", "width", "exact"),
    [
        (sw.Float32(), 4, [torch.float16, torch.bfloat16, torch.float32]),
        (sw.BFloat16(), 2, [torch.bfloat16]),
        (sw.Float16(), 2, [torch.float16]),
    ],
    ids=repr,
)
def test_width_and_exactness(codec: ValueCodec, width: int, exact: list[torch.dtype]) -> None:
    assert codec.linear
    assert codec.nbytes(alone(sw.TopK(count=10), 20)) == 10 * width
    assert codec.nbytes(alone(sw.Dense(), 20)) == 20 * width
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    assert [dtype for dtype in types if codec.exact(dtype)] == exact


@pytest.mark.parametrize(
    ("codec", "given", "read"),
    [
        (sw.Float16(), 1e30, 65504.0),
        (sw.Float16(), -65519.0, -65504.0),
        (sw.Float16(), 1e-9, 0.0),
        (sw.Float16(), 1.0004, 1.0),
        (sw.BFloat16(), 3.4e38, 3.3895313892515355e38),
        (sw.BFloat16(), 1.003, 1.0),
        (sw.Float32(), 0.1, 0.10000000149011612),
    ],
)
def test_rounding(codec: ValueCodec, given: float, read: float) -> None:
    assert through(codec, torch.tensor([given, -given])).tolist() == [read, -read]


def test_float32_of_doubles_too_large() -> None:
    values = torch.tensor([1e300, -1e300], dtype=torch.float64)
    assert through(sw.Float32(), values).tolist() == [LIMIT, -LIMIT]


@pytest.mark.parametrize("codec", CASTS, ids=label)
def test_encoding_leaves_values_alone_and_takes_any_layout(codec: ValueCodec) -> None:
    values = torch.arange(10.0)[::2]
    kept = values.clone()
    assert torch.equal(through(codec, values), kept)
    assert torch.equal(values, kept)


@pytest.mark.parametrize("codec", QUANTIZED, ids=label)
def test_quantizing_leaves_values_alone_and_takes_any_layout(codec: ValueCodec) -> None:
    values = torch.linspace(-1, 1, 22)[::2]
    kept = values.clone()
    assert torch.equal(through(codec, values), through(codec, kept.contiguous()))
    assert torch.equal(values, kept)


def test_signs_of_zero_survive() -> None:
    for codec in CASTS:
        read = through(codec, torch.tensor([-0.0, 0.0]))
        assert read.signbit().tolist() == [True, False]


# ---- a few bits per value

SHAPES = {"a": (6, 7), "b": (3, 2, 4), "bias": (5,)}


def scattered(count: int, scope: object = "layer") -> tuple[Place, Tensor]:
    """Some coordinates of every segment, their values and those that are sent densely."""
    segments = Segments.partition(SHAPES, sw.RandomK(count=count), scope, dense_below=6)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(count)
    indices = [
        p.start + torch.randperm(p.length, generator=generator)[: p.count].sort().values
        for p in segments.sparse
    ]
    values = torch.randn(segments.capacity + segments.dense_size, generator=generator) ** 3
    return Place(torch.cat(indices), segments, 7, Workspace()), values


def bits_of(codec: ValueCodec) -> int:
    return int(getattr(codec, "bits", 0)) or {"OneBit": 1, "TwoBit": 2}[type(codec).__name__]


@pytest.mark.parametrize("codec", QUANTIZED, ids=label)
@pytest.mark.parametrize("scope", ["layer", "global", 10])
def test_bytes_of_a_message(codec: ValueCodec, scope: object) -> None:
    """Centres of four bytes, groups of eight codes, and dense values in bfloat16."""
    place, values = scattered(4, scope)
    segments = place.segments
    centres = len(segments.sparse)
    if codec == sw.OneBit("column"):
        centres = 7 + 2 * 4  # none for the bias, which is sent densely
    if isinstance(codec, sw.LloydMax):
        centres *= 2 ** (codec.bits - 1)
    if isinstance(codec, sw.QSGD):
        centres = sum(math.ceil(segment.capacity / codec.bucket) for segment in segments.sparse)
    expected = (
        4 * centres + math.ceil(segments.capacity / 8) * bits_of(codec) + 2 * segments.dense_size
    )
    assert codec.nbytes(segments) == codec.encode(values, place).numel() == expected
    assert not codec.linear
    assert not any(codec.exact(dtype) for dtype in (torch.bfloat16, torch.float32))


@pytest.mark.parametrize("codec", QUANTIZED, ids=label)
def test_whole_values_go_as_bfloat16(codec: ValueCodec) -> None:
    place, values = scattered(4)
    capacity = place.segments.capacity
    read = through(codec, values, place)
    assert torch.equal(read[capacity:], values[capacity:].bfloat16().float())


def twin(codec: ValueCodec, values: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """METHODS.md in NumPy: every owner's values by themselves."""
    read = np.zeros_like(values)
    for number in np.unique(owner):
        own = np.abs(values[owner == number])
        if isinstance(codec, sw.OneBit):
            sizes = np.full(len(own), own.min() if codec.centre == "threshold" else own.mean())
        elif isinstance(codec, sw.LloydMax):
            sizes = lloyd(own, 2 ** (codec.bits - 1))
        else:
            levels = 2 ** (bits_of(codec) - 1)
            step = 2 * own.mean() / levels
            sizes = step * (0.5 + np.minimum(np.floor(own / step), levels - 1))
        read[owner == number] = np.where(values[owner == number] < 0, -sizes, sizes)
    return read


def lloyd(sizes: np.ndarray, levels: int) -> np.ndarray:
    """Lloyd's algorithm: magnitudes from half the mean upwards become the means of their groups."""
    centres = sizes.mean() / 2 * (2 * levels) ** (np.arange(levels) / (levels - 1))
    for _ in range(4):
        nearest = np.abs(sizes[:, None] - centres).argmin(axis=1)
        centres = np.array(
            [
                sizes[nearest == n].mean() if (nearest == n).any() else c
                for n, c in enumerate(centres)
            ]
        )
    found: np.ndarray = centres[np.abs(sizes[:, None] - centres).argmin(axis=1)]
    return found


MORE = [*(sw.KBit(bits) for bits in (1, 2, 5, 8)), *(sw.LloydMax(bits) for bits in (2, 4, 8))]


@pytest.mark.parametrize("codec", [*STEADY, *MORE], ids=label)
@pytest.mark.parametrize("scope", ["layer", "global", 10])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_formula(codec: ValueCodec, scope: object, count: int) -> None:
    place, values = scattered(count, scope)
    segments, indices = place.segments, place.indices.numpy()
    if codec == sw.OneBit("column"):
        starts = {"a": (0, 7), "b": (42, 8)}
        if scope == "global":
            assert [param.name for param in segments.params] == ["a", "b", "bias"]
        start, columns = (
            np.where(indices < 42, *pair) for pair in zip(*starts.values(), strict=True)
        )
        owner = (indices - start) % columns + np.where(indices < 42, 0, 100)
    else:
        owner = np.searchsorted([p.start for p in segments.sparse], indices, side="right")
    selected = values[: segments.capacity]
    expected = twin(codec, selected.double().numpy(), owner)
    read = through(codec, values, place)[: segments.capacity]
    assert read.numpy() == pytest.approx(expected, rel=1e-6)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=30))
@LAWFUL
def test_kinship(numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    assert torch.equal(through(sw.KBit(1), values), through(sw.OneBit("global"), values))
    assert torch.equal(through(sw.KBit(2), values), through(sw.TwoBit(), values))


@pytest.mark.parametrize("codec", STEADY, ids=label)
@given(st.lists(st.floats(-(2.0**50), 2.0**50, width=32), min_size=1, max_size=30))
@LAWFUL
def test_what_is_left_is_less(codec: ValueCodec, numbers: list[float]) -> None:
    """‖x − C(x)‖ < ‖x‖, which error feedback needs, zeros among them or not."""
    values = torch.tensor(numbers).masked_fill(torch.tensor(numbers).abs() < 1e-15, 0)
    read = through(codec, values).double()
    gained = (read * (2 * values.double() - read)).sum()  # ‖x‖² − ‖x − C(x)‖²
    assert gained > 0 or not values.any()


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 16])
def test_errors_of_steps(bits: int) -> None:
    """Half a step, within twice the mean; beyond, what is over the last midpoint."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    mean = float(values.abs().mean())
    step = 2 * mean / 2 ** (bits - 1)
    error = (values - through(sw.KBit(bits), values)).abs()
    excess = (values.abs() - 2 * mean).clamp(min=0)
    assert (error <= step / 2 + excess + 1e-5 * mean).all()


@pytest.mark.parametrize("power", [1, 3, 7])
def test_lloyd_max_fits_its_magnitudes_to_the_values(power: int) -> None:
    """Its error is below that of fixed steps, also if a few values are far larger than the rest."""
    generator = torch.Generator().manual_seed(power)
    values = (1 + torch.randn(1000, generator=generator).abs()) ** power

    def error(codec: ValueCodec) -> float:
        return float((values - through(codec, values)).square().sum() / values.square().sum())

    errors = [error(sw.LloydMax(bits)) for bits in range(2, 9)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < error(sw.OneBit()) * 0.6
    assert errors[0] < error(sw.TwoBit())
    assert errors[1] < error(sw.KBit(3))


def test_lloyd_max_sends_a_few_different_values_exactly() -> None:
    values = torch.tensor([3.0, -3.0, 700.0, 3.0, -700.0])
    assert torch.equal(through(sw.LloydMax(2), values), values)
    assert torch.equal(through(sw.LloydMax(8), values), values)
    assert not torch.equal(through(sw.TwoBit(), values), values)


@pytest.mark.parametrize(
    "codec", [sw.OneBit("global"), sw.OneBit("threshold"), sw.OneBit("column")], ids=label
)
def test_one_bit_is_stable(codec: ValueCodec) -> None:
    """What was read is written again as it is; with more bits, the mean moves."""
    place, values = scattered(9)
    once = through(codec, values, place)
    assert torch.equal(through(codec, once, place), once)


@pytest.mark.parametrize("codec", QUANTIZED, ids=label)
def test_zeros(codec: ValueCodec) -> None:
    """No norm, no mean: nothing is divided by."""
    assert not through(codec, torch.zeros(40)).any()


@pytest.mark.parametrize("codec", QUANTIZED, ids=label)
@pytest.mark.parametrize("size", [1e-45, 1e-38, 3e38, LIMIT, 1e300])
@pytest.mark.parametrize("count", [1, 40])
def test_tiny_and_huge_values_stay_finite(codec: ValueCodec, size: float, count: int) -> None:
    values = torch.full((count,), size, dtype=torch.float64)
    values[::2] *= -1
    read = through(codec, values)
    assert read.isfinite().all()
    assert (read * values.sign() >= 0).all()
    assert (read.float().abs() <= LIMIT).all()
    place = place_of(count)
    assert codec.decode(codec.encode(values, place), place, torch.float32).isfinite().all()
    if size == 3e38 and not rolls_dice(codec):
        assert read.all()  # an instalment


@pytest.mark.parametrize("codec", QUANTIZED, ids=label)
def test_nowhere_does_not_count(codec: ValueCodec) -> None:
    """Room that is left changes nothing about the values beside it."""
    segments = alone(sw.TopK(count=20), 100)
    indices = torch.cat([torch.arange(12) * 3, torch.full((8,), 100)])
    values = torch.cat(
        [torch.randn(12, generator=torch.Generator().manual_seed(1)), torch.zeros(8)]
    )
    padded = through(codec, values, Place(indices, segments, 5, Workspace()))
    tight = alone(sw.TopK(count=12), 100)
    alike = through(codec, values[:12], Place(indices[:12], tight, 5, Workspace()))
    assert torch.equal(padded[:12], alike)


def test_a_value_among_zeros_is_not_multiplied() -> None:
    """Zeros are read as ± the centre, so that they must count in the mean."""
    values = torch.zeros(100)
    values[3] = 1
    for codec in STEADY:
        assert through(codec, values).abs().sum() <= 1 + 1e-6


@pytest.mark.parametrize(
    "codec", [sw.QSGD(2, bucket=8), sw.QSGD(), sw.QSGD(8, bucket=64)], ids=label
)
def test_qsgd_is_right_on_average(codec: sw.QSGD) -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(2))
    reads = torch.stack([through(codec, values, key=key) for key in range(3000)]).double()
    error = reads.std(dim=0) / len(reads) ** 0.5
    assert ((reads.mean(dim=0) - values).abs() <= 4.5 * error + 1e-6).all()
    levels = 2 ** (codec.bits - 1) - 1
    bucket = min(64, codec.bucket)
    bound = min(bucket / levels**2, math.sqrt(bucket) / levels)
    lost = (reads - values).square().sum(dim=1).mean() / values.double().square().sum()
    assert lost <= bound


def test_qsgd_reads_multiples_of_the_norm() -> None:
    values = torch.tensor([3.0, -4.0, 0.0, 5.0, 12.0, 0.0])
    read = through(sw.QSGD(3, bucket=3), values)
    for part, norm in ((read[:3], 5.0), (read[3:], 13.0)):
        level = part.double() * 3 / norm
        assert torch.allclose(level, level.round(), atol=1e-6)
    assert (read[2], read[5]) == (0, 0)
    exact = torch.tensor([1.0, -1.0, 1.0, 1.0])  # each is half the norm, 63.5 levels of 127
    error = (through(sw.QSGD(8, bucket=4), exact) - exact).abs()
    assert error.max() <= 2 / 127


def test_qsgd_depends_on_key_and_coordinate_alone() -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(3))
    before = torch.random.get_rng_state()
    assert torch.equal(through(sw.QSGD(), values, key=1), through(sw.QSGD(), values, key=1))
    assert not torch.equal(through(sw.QSGD(), values, key=1), through(sw.QSGD(), values, key=2))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sw.OneBit("row"), "'threshold', 'column' or 'global', not 'row'"),
        (lambda: sw.KBit(0), "from 1 to 16, not 0"),
        (lambda: sw.KBit(17), "from 1 to 16, not 17"),
        (lambda: sw.KBit(True), "from 1 to 16, not True"),
        (lambda: sw.LloydMax(1), "from 2 to 8, not 1"),
        (lambda: sw.LloydMax(9), "from 2 to 8, not 9"),
        (lambda: sw.QSGD(1), "from 2 to 16, not 1"),
        (lambda: sw.QSGD(4.0), "from 2 to 16, not 4.0"),
        (lambda: sw.QSGD(4, bucket=0), "bucket must be a whole number"),
        (lambda: sw.QSGD(4, bucket=True), "bucket must be a whole number"),
        (lambda: sw.QSGD(4, bucket=10**20), "from 1 to 2^31 - 1, such as 16, not 1000"),
        (lambda: sw.QSGD(4, bucket=2**31), "from 1 to 2^31 - 1, such as"),
    ],
)
def test_refusals(make: object, words: str) -> None:
    with pytest.raises(sw.errors.SchemeError) as refusal:
        make()  # type: ignore[operator]
    assert words in str(refusal.value)
