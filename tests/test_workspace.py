"""What a rank keeps from step to step: for whom, how long, and that it goes with no copy."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import sparsewire as sw
from sparsewire.segments import Segments
from sparsewire.session import Session
from sparsewire.workspace import Workspace

from .laws.cases import CPU

SHAPES = {"w": (100, 50), "b": (50,)}


def cut() -> Segments:
    return Segments.partition(SHAPES, sw.TopK(0.01))


def test_what_is_kept_is_made_once_for_every_owner_and_key() -> None:
    work, one, other = Workspace(), cut(), cut()
    assert one == other
    made = work.kept(one, "plan", object)
    assert work.kept(one, "plan", object) is made
    assert work.kept(one, "table", object) is not made
    assert work.kept(other, "plan", object) is not made
    assert Workspace().kept(one, "plan", object) is not made


def test_nobody_is_taken_for_an_owner_that_is_gone() -> None:
    work = Workspace()
    assert [work.kept(cut(), "plan", lambda n=n: n) for n in range(9)] == list(range(9))  # type: ignore[misc]


def test_a_copy_begins_with_nothing_kept() -> None:
    work, segments = Workspace(), cut()
    work.met.add((1, 2))
    work.buffer("sum", 8, CPU)
    made = work.kept(segments, "plan", object)
    for copied in (copy.copy(work), pickle.loads(pickle.dumps(work))):
        assert copied.met == {(1, 2)}
        assert not copied.buffers
        assert copied.kept(segments, "plan", object) is not made
    assert work.kept(segments, "plan", object) is made


def test_nothing_is_kept_inside_segments() -> None:
    segments = cut()
    before = pickle.dumps(segments)
    segments.table(CPU, Workspace())
    segments.strides(100)
    assert pickle.dumps(segments) == before
    assert pickle.loads(before) == segments


@pytest.mark.parametrize("names", [("w", "b"), ("b", "w")])
def test_a_session_keeps_nothing_for_exchanges_that_are_gone(names: tuple[str, ...]) -> None:
    session, scheme = Session(sw.Scheme(sw.TopK(0.01)), SHAPES), sw.Scheme(sw.TopK(0.01))
    first = session.find_exchange(0, scheme, SHAPES, torch.float32)
    made = session.work.kept(first.segments, "plan", object)
    shapes = {name: SHAPES[name] for name in names}
    again = session.find_exchange(0, scheme, shapes, torch.float32)
    assert (again is first) == (names == ("w", "b"))
    assert (session.work.kept(first.segments, "plan", object) is made) == (again is first)


def test_a_workspace_goes_from_state_to_state() -> None:
    gradients = {"w": torch.randn(100, 50)}
    first = sw.functional.init("TopK(0.01)", gradients)
    _, (one, other) = sw.functional.simulate([gradients] * 2, [first] * 2)
    _, (later, another) = sw.functional.simulate([gradients] * 2, [one, other])
    works = [state._session and state._session.work for state in (one, other, later, another)]
    assert works[0] is works[2]
    assert works[1] is works[3]
    assert works[0] is not works[1]
