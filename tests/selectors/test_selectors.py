"""Selectors: how many are sent, what is refused, and who shares what."""

from __future__ import annotations

import math
from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given

import sparsewire as sw
from sparsewire.selectors import Coordination, Selector, Sized

from ..laws.cases import LAWFUL, examples, label

ONE_BY_ONE = [
    kind
    for kind in sw.scheme.FAMILIES["selectors"]
    if issubclass(kind, Sized) and kind is not sw.TopBlock
]
SIZED = [kind for kind in sw.scheme.FAMILIES["selectors"] if issubclass(kind, Sized)]


@pytest.mark.parametrize("kind", ONE_BY_ONE)
@pytest.mark.parametrize(
    ("ratio", "length", "entries"),
    [
        (0.01, 1, 1),
        (0.01, 99, 1),
        (0.01, 100, 1),
        (0.01, 101, 2),  # rounded up
        (0.07, 100, 7),  # though 0.07 * 100 is a hair above 7
        (0.29, 100, 29),
        (0.1, 30, 3),
        (1 / 3, 3, 1),
        (0.999, 10, 10),
        (1.0, 10, 10),
        (1e-9, 1000, 1),
    ],
)
def test_ratio_is_rounded_up(kind: type[Sized], ratio: float, length: int, entries: int) -> None:
    assert kind(ratio).entries(length) == entries


@given(st.integers(1, 1000), st.integers(1, 10**9))
@LAWFUL
def test_entries_are_the_exact_ceiling(thousandths: int, length: int) -> None:
    exact = math.ceil(Fraction(thousandths, 1000) * length)
    assert sw.TopK(thousandths / 1000).entries(length) == exact


@pytest.mark.parametrize("kind", ONE_BY_ONE)
def test_count_is_at_most_the_length(kind: type[Sized]) -> None:
    assert [kind(count=10).entries(length) for length in (1, 9, 10, 11)] == [1, 9, 10, 10]


@pytest.mark.parametrize("kind", ONE_BY_ONE)
def test_min_count_is_for_short_segments(kind: type[Sized]) -> None:
    selector = kind(0.01, min_count=16)
    assert [selector.entries(n) for n in (1, 16, 17, 1600, 1601)] == [1, 16, 16, 16, 17]
    assert kind(0.01).identity == kind(0.01, min_count=1).identity != selector.identity


def test_min_count_is_rounded_up_to_whole_blocks() -> None:
    assert sw.TopBlock(0.01, block=8, min_count=9).entries(800) == 16


@pytest.mark.parametrize(
    ("ratio", "length", "entries"),
    [
        (0.01, 1, 1),
        (0.01, 10, 10),  # one block, all there is
        (0.01, 11, 10),
        (0.01, 1000, 10),
        (0.01, 1001, 20),  # 2 of 101 blocks
        (0.07, 1000, 70),  # though 0.07 * 100 is a hair above 7
        (0.99, 95, 95),
        (1.0, 95, 95),
    ],
)
def test_blocks_are_rounded_up(ratio: float, length: int, entries: int) -> None:
    assert sw.TopBlock(ratio, block=10).entries(length) == entries


def test_counts_are_rounded_up_to_whole_blocks() -> None:
    counts = (1, 10, 11, 95, 1000)
    assert [sw.TopBlock(count=c, block=10).entries(95) for c in counts] == [10, 10, 20, 95, 95]


@pytest.mark.parametrize("block", [0, -1, 1.5, True, None])
def test_blocks_of_no_length_are_refused(block: object) -> None:
    with pytest.raises(
        sw.errors.SchemeError, match=r"at least 1, as in TopBlock\(0.01, block=64\)"
    ):
        sw.TopBlock(0.01, block=block)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", SIZED)
def test_default_is_one_percent(kind: type[Sized]) -> None:
    assert kind() == kind(0.01) == kind(ratio=0.01)
    assert kind(1) == kind(1.0)


@pytest.mark.parametrize("kind", SIZED)
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"ratio": 0.0}, "above 0 and at most 1"),
        ({"ratio": -0.1}, "above 0 and at most 1"),
        ({"ratio": 1.5}, r"count=100"),
        ({"ratio": 100}, r"or \w+\(count=100\) for a number of coordinates"),
        ({"ratio": math.nan}, "above 0 and at most 1"),
        ({"ratio": math.inf}, "above 0 and at most 1"),
        ({"ratio": True}, "must be a number"),
        ({"ratio": "0.01"}, "must be a number"),
        ({"ratio": 0.01, "count": 5}, "a ratio or a count, not both"),
        ({"count": 0}, "at least 1"),
        ({"count": -3}, "at least 1"),
        ({"count": 1.5}, "whole number"),
        ({"count": True}, "whole number"),
        ({"min_count": 0}, r"at least 1, and goes with a ratio, as in \w+\(0\.01, min_count=32"),
        ({"count": 5, "min_count": 2}, "goes with a ratio"),
        ({"min_count": 1.5}, "whole number"),
        ({"min_count": True}, "whole number"),
    ],
)
def test_refusals(kind: type[Sized], arguments: dict[str, float], reason: str) -> None:
    with pytest.raises(sw.errors.SchemeError, match=reason) as refusal:
        kind(**arguments)  # type: ignore[arg-type]
    assert kind.__name__ in str(refusal.value)


@pytest.mark.parametrize("sample", [99, 0, -1, 1e5, True, "all"])
def test_threshold_refuses_a_sample_that_is_none(sample: object) -> None:
    with pytest.raises(sw.errors.SchemeError, match="whole number of at least 100"):
        sw.Threshold(0.01, sample=sample)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", SIZED)
def test_resized_keeps_all_else(kind: type[Sized]) -> None:
    changed = {"sample": 500} if kind is sw.Threshold else {}
    assert kind(0.01, **changed).resized(0.5) == kind(0.5, **changed)


@pytest.mark.parametrize("selector", examples("selectors"), ids=label)
def test_selectors_cannot_be_changed(selector: Selector) -> None:
    with pytest.raises(AttributeError):
        selector.ratio = 0.5  # type: ignore[attr-defined]


def test_threshold_has_room_for_a_quarter_more() -> None:
    assert [sw.Threshold(count=k).capacity(100) for k in (1, 3, 4, 10, 80, 90)] == [
        2,
        4,
        5,
        13,
        100,
        100,
    ]


@pytest.mark.parametrize(
    ("selector", "coordination"),
    [
        (sw.TopK(), Coordination.LOCAL),
        (sw.Threshold(), Coordination.LOCAL),
        (sw.RandomK(), Coordination.SHARED_SEEDED),
        (sw.RandomK(shared=False), Coordination.LOCAL_SEEDED),
        (sw.BlockRandomK(), Coordination.LOCAL_SEEDED),
        (sw.BlockRandomK(shared=True), Coordination.SHARED_SEEDED),
        (sw.TopBlock(), Coordination.NEGOTIATED),
        (sw.LeaderTopK(), Coordination.NEGOTIATED),
        (sw.UnionTopK(), Coordination.NEGOTIATED),
        (sw.Dense(), Coordination.SHARED_SEEDED),
    ],
    ids=label,
)
def test_how_ranks_come_to_coordinates(selector: Selector, coordination: Coordination) -> None:
    assert selector.coordination is coordination
    assert (selector.proposers == "none") or coordination is Coordination.NEGOTIATED
