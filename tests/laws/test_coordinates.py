"""Indices are ascending, unique, in range, as many as announced, and emptied."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import sparsewire as sw
from sparsewire.codecs import IndexCodec
from sparsewire.kernels import Selection
from sparsewire.segments import Segments
from sparsewire.selectors import NO_STATE, Accumulation, Selector
from sparsewire.workspace import Workspace

from .cases import CPU, LAWFUL, SCOPES, SHAPES, examples, label, noise, random_key

# ties, zeros and huge magnitudes included
numbers = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -1e30]) | st.floats(-10, 10, width=32)


def choose(
    selector: Selector, given: Accumulation, segments: Segments, step: int = 0, rank: int = 0
) -> Selection:
    return selector.select(given, segments, random_key(step, rank), NO_STATE, Workspace())


def by_segment(indices: torch.Tensor, segments: Segments) -> list[list[int]]:
    """The indices that lie in every segment."""
    found = indices.tolist()
    return [[i for i in found if p.start <= i < p.start + p.length] for p in segments.sparse]


@pytest.mark.parametrize("selector", examples("selectors"), ids=label)
@given(
    data=st.data(),
    scope=st.sampled_from([*SCOPES, 3]),
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    step=st.integers(0, 5),
)
@LAWFUL
def test_entries_selected(
    selector: Selector, data: st.DataObject, scope: object, lengths: list[int], step: int
) -> None:
    shapes = {f"p{number}": (length,) for number, length in enumerate(lengths)}
    segments = Segments.partition(shapes, selector, scope, dense_below=0, dense_1d=False)  # type: ignore[arg-type]
    size = segments.size
    row = data.draw(st.lists(numbers, min_size=size, max_size=size))
    gradient = torch.tensor(row, dtype=torch.float32)
    after = torch.zeros(size + 1)
    selection = choose(selector, Accumulation(None, gradient, after), segments, step)
    indices, values = selection.indices, selection.values[: segments.capacity]
    if not segments.capacity:
        return

    assert indices.dtype == torch.int64
    assert indices.numel() == values.numel() == segments.capacity
    real = [index for index in indices.tolist() if index != size]
    assert indices.tolist()[len(real) :] == [size] * (
        segments.capacity - len(real)
    )  # nowhere is last
    assert real == sorted(set(real))
    rows = by_segment(indices, segments)
    assert sum(map(len, rows)) == len(real)  # none lies outside all segments
    for segment, chosen in zip(segments.sparse, rows, strict=True):
        if isinstance(selector, (sw.Threshold, sw.TopBlock)):  # of which a block may be shorter
            assert len(chosen) <= segment.capacity
        else:
            assert len(chosen) == segment.count
    somewhere = indices < size
    assert torch.equal(values[somewhere], gradient[indices[somewhere]])
    assert not values[~somewhere].any()
    assert not after[indices].any()  # zero is left behind
    untouched = torch.ones(size, dtype=torch.bool)
    untouched[indices[somewhere]] = False
    for start, stop in segments.dense_runs:
        untouched[start:stop] = False
    assert torch.equal(after[:size][untouched], gradient[untouched])


@pytest.mark.parametrize("selector", examples("selectors"), ids=label)
@pytest.mark.parametrize("scope", SCOPES)
def test_residual_and_gradient_are_added_before_selecting(
    selector: Selector, scope: object
) -> None:
    segments = Segments.partition(SHAPES, selector, scope, dense_below=0, dense_1d=False)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(segments.size + 1, generator=generator)
    before[-1] = 0
    kept = before.clone()
    gradient = torch.randn(segments.size, generator=generator)
    after = torch.full((segments.size + 1,), 7.0)
    after[-1] = 0
    selection = choose(selector, Accumulation(before, gradient, after), segments)
    indices = torch.cat([selection.indices, *(torch.arange(*run) for run in segments.dense_runs)])
    total = torch.zeros_like(before)
    total[:-1] = before[:-1] + gradient
    assert torch.equal(before, kept)
    assert torch.equal(selection.values, total[indices])
    total[indices] = 0
    assert torch.equal(after, total)


@pytest.mark.parametrize("selector", examples("selectors"), ids=label)
def test_seeded_coordinates_are_those_selected(selector: Selector) -> None:
    segments = Segments.partition(SHAPES, selector, dense_below=0, dense_1d=False)
    if not selector.coordination.is_seeded:
        with pytest.raises(NotImplementedError, match="depend on the gradient"):
            selector.coordinates(segments, random_key(0), CPU, Workspace())
        return
    (gradient,), after = noise(1, segments.size, 0), torch.zeros(segments.size + 1)
    for rank in range(3):
        selection = choose(selector, Accumulation(None, gradient, after), segments, 1, rank)
        indices = selector.coordinates(segments, random_key(1, rank), CPU, Workspace())
        assert torch.equal(selection.indices, indices)


@pytest.mark.parametrize("codec", examples("indices"), ids=label)
@pytest.mark.parametrize("selector", examples("selectors"), ids=label)
def test_index_codecs_bring_back_what_they_wrote(selector: Selector, codec: IndexCodec) -> None:
    segments = Segments.partition(SHAPES, selector, dense_below=0, dense_1d=False)
    (gradient,), after = noise(1, segments.size, 0), torch.zeros(segments.size + 1)
    indices = choose(selector, Accumulation(None, gradient, after), segments).indices
    data = codec.encode(indices, segments)
    assert (data.dtype, data.numel()) == (torch.uint8, codec.nbytes(segments))
    if codec.written:
        assert torch.equal(codec.decode(data, segments), indices)
    else:
        assert data.numel() == 0


@pytest.mark.parametrize("selector", examples("selectors"), ids=label)
@given(length=st.integers(1, 10**9))
@LAWFUL
def test_sizes_fit_the_piece(selector: Selector, length: int) -> None:
    assert 1 <= selector.entries(length) <= selector.capacity(length) <= length
