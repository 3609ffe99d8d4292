"""One rank's memory: transactions, parameters found by name, and state that does not fit."""

from __future__ import annotations

import math
import statistics
import time

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.ledger import Ledger, Remembered
from sparsewire.memory import LEDGER
from sparsewire.segments import Segments

from .laws.cases import CPU

SHAPES = {"a": (2, 2), "b": (3,), "c": ()}


def cut(*names: str) -> Segments:
    return Segments.cut({name: SHAPES[name] for name in names}, sw.TopK(0.5), whole=None)


def begin(ledger: Ledger, amount: float, *names: str, unit: int = 0) -> None:
    """Add an amount to these parameters, and leave the step open."""
    segments = cut(*names)
    before, after = ledger.open(unit, segments, torch.float32, CPU)
    for field in ledger.fields:
        after[field].copy_(before[field])
        after[field][: segments.size] += amount


def add(ledger: Ledger, amount: float, *names: str, unit: int = 0) -> None:
    begin(ledger, amount, *names, unit=unit)
    ledger.commit()


def amounts(ledger: Ledger, field: str = LEDGER) -> dict[str, float]:
    """What is remembered of each parameter, which is the same at all its coordinates."""
    found = {}
    for name, kept in ledger.state().items():
        assert kept[field].shape == SHAPES[name]
        assert len(set(kept[field].reshape(-1).tolist())) == 1
        found[name] = float(kept[field].reshape(-1)[0])
    return found


@pytest.fixture
def ledger() -> Ledger:
    return Ledger((LEDGER,), SHAPES)


def test_starts_with_zeros_and_a_spare_slot(ledger: Ledger) -> None:
    assert amounts(ledger) == {"a": 0, "b": 0, "c": 0}
    assert ledger.recall("a") == {}
    before, after = ledger.open(0, cut("a", "b"), torch.float64, CPU)
    assert before[LEDGER].tolist() == [0.0] * 8
    assert after[LEDGER].shape == (8,)
    assert after[LEDGER].dtype == torch.float64


def test_commit_keeps_the_step(ledger: Ledger) -> None:
    add(ledger, 1, "a", "b")
    add(ledger, 10, "a", "b")
    assert amounts(ledger) == {"a": 11, "b": 11, "c": 0}


def test_open_step_is_not_seen(ledger: Ledger) -> None:
    add(ledger, 1, "a")
    begin(ledger, 10, "a")
    assert amounts(ledger)["a"] == 1


def test_discard_leaves_no_trace(ledger: Ledger) -> None:
    add(ledger, 1, "a")
    begin(ledger, 10, "a")
    ledger.discard()
    ledger.commit()  # nothing is open
    assert amounts(ledger)["a"] == 1
    add(ledger, 100, "a")
    assert amounts(ledger)["a"] == 101


def test_units_commit_together(ledger: Ledger) -> None:
    begin(ledger, 1, "a", unit=0)
    begin(ledger, 2, "b", unit=1)
    assert amounts(ledger) == {"a": 0, "b": 0, "c": 0}
    ledger.commit()
    assert amounts(ledger) == {"a": 1, "b": 2, "c": 0}


def test_undo_takes_back_the_last_step_once(ledger: Ledger) -> None:
    add(ledger, 1, "a", "b")
    add(ledger, 10, "a", "b")
    assert ledger.undo()
    assert amounts(ledger) == {"a": 1, "b": 1, "c": 0}
    assert not ledger.undo()
    assert amounts(ledger) == {"a": 1, "b": 1, "c": 0}


def test_undo_is_too_late_when_the_next_step_has_begun(ledger: Ledger) -> None:
    add(ledger, 1, "a")
    begin(ledger, 10, "a")
    assert not ledger.undo()
    ledger.discard()
    assert amounts(ledger)["a"] == 1


def test_parameters_are_found_by_name_in_other_units(ledger: Ledger) -> None:
    """DDP rebuilds its buckets after the first step."""
    begin(ledger, 1, "a", "b", unit=0)
    begin(ledger, 2, "c", unit=1)
    ledger.commit()
    begin(ledger, 10, "c", "a", unit=0)
    begin(ledger, 20, "b", unit=1)
    ledger.commit()
    assert amounts(ledger) == {"a": 11, "b": 21, "c": 12}


def test_new_layout_survives_a_discarded_step(ledger: Ledger) -> None:
    add(ledger, 1, "a", "b", "c")
    begin(ledger, 10, "c", "b", "a")
    ledger.discard()
    assert amounts(ledger) == {"a": 1, "b": 1, "c": 1}
    add(ledger, 100, "c", "b", "a")
    assert amounts(ledger) == {"a": 101, "b": 101, "c": 101}


def test_parameters_are_found_when_units_change_back(ledger: Ledger) -> None:
    add(ledger, 1, "a", unit=0)
    add(ledger, 1, "b", unit=1)
    add(ledger, 10, "a", "b", unit=0)
    add(ledger, 100, "b", unit=1)
    assert amounts(ledger)["b"] == 111


def test_parameters_left_out_keep_their_memory(ledger: Ledger) -> None:
    add(ledger, 1, "a", "b")
    add(ledger, 10, "a")
    add(ledger, 100, "a", "b")
    assert amounts(ledger) == {"a": 111, "b": 101, "c": 0}


def test_scale(ledger: Ledger) -> None:
    add(ledger, 4, "a", "b", "c")
    ledger.scale({"a": 0.5, "c": 2.0}, (LEDGER,))
    assert amounts(ledger) == {"a": 2, "b": 4, "c": 8}
    add(ledger, 1, "a", "b", "c")
    assert amounts(ledger) == {"a": 3, "b": 5, "c": 9}


def test_scale_touches_only_the_named_fields() -> None:
    ledger = Ledger((LEDGER, "velocity"), SHAPES)
    add(ledger, 4, "a", "b", "c")
    ledger.scale({"a": 0.5}, (LEDGER,))
    assert amounts(ledger)["a"] == 2
    assert amounts(ledger, "velocity")["a"] == 4


def test_scale_reaches_what_is_not_laid_out_yet(ledger: Ledger) -> None:
    ledger.scale({"a": 0.5}, (LEDGER,))  # nothing there yet
    ledger.load(full(6.0))
    ledger.scale({"a": 0.5}, (LEDGER,))
    assert amounts(ledger) == {"a": 3, "b": 6, "c": 6}


def full(amount: float, *fields: str) -> Remembered:
    return {
        name: {field: torch.full(shape, amount) for field in fields or (LEDGER,)}
        for name, shape in SHAPES.items()
    }


def test_state_is_a_copy(ledger: Ledger) -> None:
    add(ledger, 1, "a", "b")
    state = ledger.state()
    state["a"][LEDGER].fill_(99)
    assert amounts(ledger)["a"] == 1
    add(ledger, 1, "a", "b")
    assert state["b"][LEDGER].tolist() == [1, 1, 1]


def test_loaded_state_is_a_copy_and_replaces_all(ledger: Ledger) -> None:
    add(ledger, 1, "a", "b", "c")
    state = full(5.0)
    ledger.load(state)
    state["a"][LEDGER].fill_(99)
    assert amounts(ledger) == {"a": 5, "b": 5, "c": 5}
    assert not ledger.undo()
    add(ledger, 1, "c", "a")
    assert amounts(ledger) == {"a": 6, "b": 5, "c": 6}


def test_load_ends_an_open_step(ledger: Ledger) -> None:
    begin(ledger, 1, "a")
    ledger.load(full(5.0))
    ledger.commit()
    assert amounts(ledger)["a"] == 5


def test_squares() -> None:
    ledger = Ledger((LEDGER,), SHAPES)
    assert ledger.squares() == {"a": 0, "b": 0, "c": 0}
    add(ledger, 2, "a", "c")
    assert ledger.squares() == {"a": 16, "b": 0, "c": 4}
    assert Ledger((), SHAPES).squares() == {}


def test_without_fields_nothing_is_kept() -> None:
    ledger = Ledger((), SHAPES)
    before, after = ledger.open(0, cut("a"), torch.float32, CPU)
    assert before == {}
    after[LEDGER].fill_(7)
    ledger.commit()
    assert ledger.state() == {"a": {}, "b": {}, "c": {}}
    ledger.load({"a": {}, "b": {}, "c": {}})


def spoilt(name: str, tensor: Tensor) -> Remembered:
    state = full(1.0)
    state[name][LEDGER] = tensor
    return state


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({}, r"lacks a, b, c: was it saved for this model\?"),
        ({"a": full(1)["a"], "c": full(1)["c"]}, "lacks b: was"),
        ({**full(1), "d": {}, "e": {}}, "knows d, e, which this model has not"),
        ({**full(1), **{f"x{i}": {} for i in range(7)}}, "knows x0, x1, x2, x3, x4 and 2 more"),
        (
            full(1, LEDGER, "velocity"),
            r"a holds \['residual', 'velocity'\], .*keeps \['residual'\]",
        ),
        (full(1, "velocity"), r"of a holds \['velocity'\]"),
        ({**full(1), "b": {}}, r"of b holds \[\]"),
        (spoilt("a", torch.zeros(4)), r"residual of a has shape \(4,\), .* has \(2, 2\)"),
        (spoilt("c", torch.zeros(1)), r"residual of c has shape \(1,\), .* has \(\)"),
        (spoilt("b", torch.tensor([0, math.nan, 0])), "residual of b holds NaN or infinity"),
        (spoilt("b", torch.tensor([0, 0, -math.inf])), "residual of b holds NaN or infinity"),
    ],
)
def test_state_that_does_not_fit_is_refused_whole(
    ledger: Ledger, state: Remembered, reason: str
) -> None:
    add(ledger, 3, "a", "b", "c")
    with pytest.raises(sw.StateError, match=reason):
        ledger.load(state)
    assert amounts(ledger) == {"a": 3, "b": 3, "c": 3}
    with pytest.raises(sw.StateError, match=reason):
        ledger.check(state)


def test_the_norm_of_a_large_memory_is_estimated_in_less_than_a_copy() -> None:
    shapes = {"a": (2000, 1003), "b": (3000, 2001)}
    ledger = Ledger((LEDGER,), shapes)
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        segments = Segments.cut({name: shape}, sw.TopK(0.01))
        _, after = ledger.open(name, segments, torch.float32, CPU)
        after[LEDGER].normal_(generator=generator)
        ledger.commit()
    exact = math.sqrt(sum(ledger.squares().values()))
    assert ledger.estimated_norm() == pytest.approx(exact, rel=0.02)

    kept = [ledger.recall(name)[LEDGER] for name in shapes]
    ratios = []
    for _ in range(9):
        start = time.perf_counter()
        ledger.estimated_norm()
        middle = time.perf_counter()
        for tensor in kept:
            tensor.clone()
        ratios.append((middle - start) / (time.perf_counter() - middle))
    assert statistics.median(ratios) < 1


def test_squares_are_summed_over_the_memory_of_workers_and_owners(ledger: Ledger) -> None:
    add(ledger, 2.0, "a", "b", "c")
    assert ledger.squares() == pytest.approx({"a": 16.0, "b": 12.0, "c": 4.0})
    assert ledger.estimated_norm() == pytest.approx(math.sqrt(32.0))
