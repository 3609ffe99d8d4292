"""How a gradient is cut: three scopes, what is sent densely, and the tables kernels work from."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import sparsewire as sw
from sparsewire.randomness import name_key
from sparsewire.segments import SEEN, ParamSlice, Segment, Segments
from sparsewire.workspace import Workspace

from .laws.cases import CPU, LAWFUL, dense

SHAPES = {"conv": (8, 4, 3, 3), "bias": (8,), "head": (50, 30), "scale": (), "small": (5, 6)}


def described(segments: tuple[Segment, ...]) -> list[tuple[str, int, int, int]]:
    return [(segment.name, segment.start, segment.length, segment.count) for segment in segments]


def test_layer_is_one_piece_per_tensor() -> None:
    cut = Segments.partition(SHAPES, sw.TopK(0.01), "layer", dense_below=100)
    assert described(cut.sparse) == [("conv", 0, 288, 3), ("head", 296, 1500, 15)]
    assert described(cut.dense) == [
        ("bias", 288, 8, 8),
        ("scale", 1796, 1, 1),
        ("small", 1797, 30, 30),
    ]
    assert cut.size == 1827


def test_global_is_one_piece_with_whole_tensors_behind() -> None:
    cut = Segments.partition(SHAPES, sw.TopK(0.01), "global", dense_below=100)
    assert [param.name for param in cut.params] == ["conv", "head", "bias", "scale", "small"]
    assert described(cut.sparse) == [("*", 0, 1788, 18)]
    assert [segment.name for segment in cut.dense] == ["bias", "scale", "small"]
    assert cut.dense_runs == ((1788, 1827),)


def test_chunks_are_named_by_tensor_and_place() -> None:
    cut = Segments.partition({"a": (25, 10), "b": (20, 10)}, sw.TopK(0.1), 100, dense_below=100)
    assert described(cut.sparse) == [
        ("a[0]", 0, 100, 10),
        ("a[100]", 100, 100, 10),
        ("a[200]", 200, 50, 5),
        ("b[0]", 250, 100, 10),
        ("b[100]", 350, 100, 10),
    ]


def test_chunks_end_with_their_tensor() -> None:
    cut = Segments.partition(
        {"a": (3, 5), "b": (2, 5)}, sw.TopK(0.5), 10, dense_below=0, dense_1d=False
    )
    assert [(p.name, p.length) for p in cut.sparse] == [("a[0]", 10), ("a[10]", 5), ("b[0]", 10)]


@pytest.mark.parametrize(
    ("shape", "limit", "is_dense"),
    [
        ((10_000,), 1024, True),  # 1-D, however large
        ((10_000,), 0, True),
        ((10_000,), None, False),
        ((), None, True),  # sends its one element anyway
        ((31, 33), 1024, True),
        ((32, 32), 1024, False),
        ((31, 33), 0, False),
        ((31, 33), None, False),
    ],
)
def test_what_is_sent_densely(shape: tuple[int, ...], limit: int | None, is_dense: bool) -> None:
    cut = Segments.partition({"x": shape}, sw.TopK(0.01), **dense(limit))
    assert (len(cut.sparse), len(cut.dense)) == ((0, 1) if is_dense else (1, 0))


@pytest.mark.parametrize("scope", ["layer", "global", 10, 1000])
@pytest.mark.parametrize("counts", [sw.Dense(), sw.TopK(1.0), sw.TopK(count=60), sw.RandomK(0.99)])
def test_piece_that_would_send_all_it_has_travels_whole(scope: Any, counts: Any) -> None:
    cut = Segments.partition({"x": (5, 12)}, counts, scope, dense_below=0, dense_1d=False)
    assert cut.sparse == ()
    assert cut.dense_size == 60
    assert cut.dense_runs == ((0, 60),)
    assert cut.capacity == 0


def test_threshold_has_more_room_than_it_wants() -> None:
    cut = Segments.partition({"x": (10, 10)}, sw.Threshold(0.1), dense_below=0, dense_1d=False)
    assert [(segment.count, segment.capacity) for segment in cut.sparse] == [(10, 13)]
    assert cut.capacity == 13


def test_empty_tensors_have_a_span_and_no_piece() -> None:
    for scope in ("layer", "global", 4):
        cut = Segments.partition(
            {"a": (0, 3), "b": (4, 3)}, sw.TopK(0.1), scope, dense_below=0, dense_1d=False
        )
        assert {param.name: param.length for param in cut.params} == {"a": 0, "b": 12}
        assert all(segment.length for segment in cut.sparse + cut.dense)


def test_nothing_at_all() -> None:
    cut = Segments.partition({}, sw.TopK(0.1))
    assert (cut.size, cut.capacity, cut.dense_size, cut.grids, cut.dense_runs) == (0, 0, 0, (), ())


def test_neighbouring_dense_segments_make_one_run() -> None:
    shapes = {"a": (3,), "b": (4,), "w": (40, 40), "c": (5,)}
    cut = Segments.partition(shapes, sw.TopK(0.1))
    assert cut.dense_runs == ((0, 7), (1607, 1612))


def test_equal_neighbours_make_one_grid() -> None:
    shapes = {"a": (4, 10), "b": (2, 20), "c": (5, 10), "d": (5, 10)}
    cut = Segments.partition(shapes, sw.TopK(0.1), dense_below=0, dense_1d=False)
    assert cut.grids == ((0, 2, 40, 4), (80, 2, 50, 5))


def test_whole_tensor_between_parts_a_grid() -> None:
    cut = Segments.partition(
        {"a": (4, 10), "bias": (3,), "b": (4, 10)}, sw.TopK(0.1), dense_below=5
    )
    assert cut.grids == ((0, 1, 40, 4), (43, 1, 40, 4))


def test_views_are_the_parameters() -> None:
    cut = Segments.partition(SHAPES, sw.TopK(0.01), "global", dense_below=100)
    flat = torch.arange(cut.size)
    seen = {param.name: view for param, view in cut.views(flat)}
    assert set(seen) == set(SHAPES)
    assert torch.equal(torch.cat(list(seen.values())), flat)
    seen["bias"].zero_()
    assert not flat[1788:1796].any()


def test_span_knows_its_end() -> None:
    param = ParamSlice("x", (2, 3), 4)
    assert (param.length, param.stop) == (6, 10)


def test_table_has_one_row_per_piece_and_is_kept() -> None:
    cut = Segments.partition(
        {"a": (4, 10), "b": (5, 10)}, sw.TopK(0.05), dense_below=0, dense_1d=False
    )
    work = Workspace()
    table = cut.table(CPU, work)
    assert table.keys.tolist() == [name_key("a"), name_key("b")]
    assert (table.starts.tolist(), table.lengths.tolist()) == ([0, 40], [40, 50])
    assert table.counts.tolist() == [2, 3]
    assert table.owner.tolist() == [0, 0, 1, 1, 1]
    assert table.place.tolist() == [0, 1, 0, 1, 2]
    assert cut.table(CPU, work) is table


def test_equal_cuts_are_equal() -> None:
    first, second = (Segments.partition(SHAPES, sw.TopK(0.01)) for _ in range(2))
    assert first == second
    assert first != Segments.partition(SHAPES, sw.TopK(0.02), dense_below=0)


@given(
    st.dictionaries(
        st.text(max_size=3), st.lists(st.integers(0, 7), max_size=4).map(tuple), max_size=6
    ),
    st.sampled_from(["layer", "global", 1, 5, 1000]),
    st.sampled_from([None, 0, 20]),
    st.sampled_from([sw.TopK(0.1), sw.Threshold(0.3), sw.RandomK(count=4), sw.Dense()]),
)
@LAWFUL
def test_segments_tile_the_gradient(
    shapes: Any, scope: Any, limit: int | None, counts: Any
) -> None:
    cut = Segments.partition(shapes, counts, scope, **dense(limit))
    assert cut.size == sum(math.prod(shape) for shape in shapes.values())
    assert sorted(param.name for param in cut.params) == sorted(shapes)
    ends = [0]
    for segment in sorted(cut.sparse + cut.dense, key=lambda segment: segment.start):
        assert segment.start == ends[-1]
        ends.append(segment.start + segment.length)
    assert ends[-1] == cut.size
    assert [p.start for p in cut.sparse] == sorted(p.start for p in cut.sparse)
    assert all(1 <= p.count < p.length and p.count <= p.capacity <= p.length for p in cut.sparse)


def test_samples_are_shared_out_by_length_and_see_enough_of_every_piece() -> None:
    shapes = {"large": (1000, 1000), "small": (100, 100), "tiny": (10, 10)}
    segments = Segments.partition(shapes, sw.TopK(0.1), dense_below=0, dense_1d=False)
    assert segments.strides(10**9) == (1, 1, 1)
    assert segments.strides(101_010) == (7, 7, 1)  # 10, less what 1000 has in common with it
    for segment, stride in zip(segments.sparse, segments.strides(1), strict=True):
        assert stride == 1 or segment.count / stride >= SEEN


def test_samples_see_all_taps_and_columns() -> None:
    shapes = {"convolution": (512, 256, 3, 3), "linear": (1024, 768)}
    total = sum(math.prod(shape) for shape in shapes.values())
    for scope in ("layer", "global"):
        segments = Segments.partition(shapes, sw.Threshold(0.01), scope)
        for wanted in range(2, 300):
            for stride in segments.strides(total // wanted):
                assert stride <= wanted
                for length in (9, 256, 768):
                    assert len({at * stride % length for at in range(length)}) == length
