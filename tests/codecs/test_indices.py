"""Index codecs: what is written comes back, in as few bits as announced, or in none at all."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import sparsewire as sw
from sparsewire.codecs import IndexCodec
from sparsewire.segments import ParamSlice, Segments

from ..laws.cases import LAWFUL, alone, examples, label

SEGMENTS = alone(sw.TopK(count=3), 100)
WRITTEN = [codec for codec in examples("indices") if codec.written]


@pytest.mark.parametrize("codec", WRITTEN, ids=label)
@given(data=st.data(), size=st.integers(2, 300))
@LAWFUL
def test_round_trip(codec: IndexCodec, data: st.DataObject, size: int) -> None:
    """Any indices in any room, what is left of it being nowhere."""
    capacity = data.draw(st.sampled_from([1, size - 1]) | st.integers(1, size - 1))
    segments = alone(sw.TopK(count=capacity), size)
    chosen = data.draw(st.sets(st.integers(0, size - 1), max_size=capacity))
    indices = torch.tensor(sorted(chosen) + [size] * (capacity - len(chosen)))
    written = codec.encode(indices, segments)
    assert (written.dtype, written.numel()) == (torch.uint8, codec.nbytes(segments))
    again = codec.decode(written, segments)
    assert again.dtype == torch.int64
    assert torch.equal(again, indices)


@pytest.mark.parametrize("codec", WRITTEN, ids=label)
@pytest.mark.parametrize("size", [2, 7, 8, 9, 1001, 65_536])
def test_extremes(codec: IndexCodec, size: int) -> None:
    for capacity in {1, size // 2, size - 1}:
        segments = alone(sw.TopK(count=capacity), size)
        first, last = torch.arange(capacity), torch.arange(size - capacity, size)
        for indices in (first, last, torch.full((capacity,), size)):
            assert torch.equal(codec.decode(codec.encode(indices, segments), segments), indices)


@pytest.mark.parametrize("codec", WRITTEN, ids=label)
def test_no_room_takes_no_bytes(codec: IndexCodec) -> None:
    for segments in (alone(sw.Dense(), 100), Segments((), (), ())):
        data = codec.encode(torch.empty(0, dtype=torch.int64), segments)
        assert data.numel() == codec.nbytes(segments) == 0
        assert codec.decode(data, segments).numel() == 0


@pytest.mark.parametrize(("ratio", "most"), [(0.01, 8.6), (0.001, 12.0)])
def test_bits_per_index(ratio: float, most: float) -> None:
    """The entropy of random coordinates is 8.08 and 11.41 bits."""
    segments = alone(sw.TopK(ratio), 1_000_000)
    bits = 8 * sw.EliasFano().nbytes(segments) / segments.capacity
    entropy = -math.log2(ratio) - (1 - ratio) / ratio * math.log2(1 - ratio)
    assert entropy < bits <= most
    assert bits < 1.065 * entropy


@given(st.integers(2, 10**7).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))))
@LAWFUL
def test_size_of_elias_fano(case: tuple[int, int]) -> None:
    """k·b bits and k + n/2^b + 1 flags, each part rounded up to its groups of eight."""
    size, capacity = case
    low = math.floor(math.log2(size // capacity))
    groups = math.ceil(capacity / 8)
    expected = groups * low + math.ceil((capacity + size // 2**low + 1) / 8)
    assert sw.EliasFano().nbytes(alone(sw.TopK(count=capacity), size)) == expected


def test_elias_fano_reaches_beyond_32_bits() -> None:
    size = 2**40
    segments = alone(sw.TopK(count=3), size)
    indices = torch.tensor([5, 2**33, size - 1])
    codec = sw.EliasFano()
    assert torch.equal(codec.decode(codec.encode(indices, segments), segments), indices)


@pytest.mark.parametrize("size", [8, 9, 100])
def test_size_of_a_bitmap(size: int) -> None:
    segments = alone(sw.TopK(count=3), size)
    assert sw.Bitmap().nbytes(segments) == math.ceil(size / 8)
    assert sw.Bitmap().encode(torch.tensor([0, 2, 7]), segments)[0] == 0b10000101


def test_int32_counts_from_the_start_of_the_gradient() -> None:
    indices = torch.tensor([0, 7, 100])  # 100 stands for nowhere
    data = sw.Int32().encode(indices, SEGMENTS)
    assert data.view(torch.int32).tolist() == [0, 7, 100]
    assert data.numel() == sw.Int32().nbytes(SEGMENTS) == 12
    assert sw.Int32().decode(data, SEGMENTS).dtype == torch.int64


def test_int32_reaches_its_limit_and_says_so() -> None:
    codec, indices = sw.Int32(), torch.tensor([2**31 - 2])
    largest = Segments((ParamSlice("x", (2**31 - 1,), 0),), (), ())
    assert codec.decode(codec.encode(indices, largest), largest).tolist() == [2**31 - 2]
    beyond = Segments((ParamSlice("x", (2**31,), 0),), (), ())
    with pytest.raises(
        sw.errors.SchemeError, match=r"2\^31 coordinates.* Use indices=EliasFano\(\)"
    ):
        codec.encode(indices, beyond)


def test_implied_sends_nothing() -> None:
    data = sw.Implied().encode(torch.tensor([1, 2, 3]), SEGMENTS)
    assert (data.numel(), data.dtype, sw.Implied().nbytes(SEGMENTS)) == (0, torch.uint8, 0)
    with pytest.raises(NotImplementedError, match="from the selector"):
        sw.Implied().decode(data, SEGMENTS)
