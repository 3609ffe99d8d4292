"""One rank's state: transactions, parameters found by name, and what does not fit."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.segments import Segments
from sparsewire.shards import owned
from sparsewire.state import OWNED, RESIDUAL, Saved, StateField, StateStore, resize

from .laws.cases import CPU, EPS, Crew, examples, label, noise, within

SHAPES = {"a": (2, 2), "b": (3,), "c": ()}


FIELD = StateField(RESIDUAL, follows_lr=True, resize="mean")
VELOCITY = StateField("velocity")
SQUARES = StateField("squares", loss_scale_power=2)
AGE = StateField("age", loss_scale_power=0)
SHARE = StateField(OWNED, extent="owned", follows_lr=True)


def cut(*names: str) -> Segments:
    return Segments.partition(
        {name: SHAPES[name] for name in names}, sw.TopK(0.5), dense_below=0, dense_1d=False
    )


def begin(store: StateStore, amount: float, *names: str, unit: int = 0) -> None:
    """Add an amount to these parameters, and leave the step open."""
    segments = cut(*names)
    layout = {field.key: segments for field in store.fields}
    state = store.open(unit, layout, torch.float32, CPU)
    for key, before in state.before.items():
        state.after[key].copy_(before)
        state.after[key][: segments.size] += amount


def add(store: StateStore, amount: float, *names: str, unit: int = 0) -> None:
    begin(store, amount, *names, unit=unit)
    store.commit()


def amounts(store: StateStore, key: str = RESIDUAL) -> dict[str, float]:
    """What is kept of each parameter, which is the same at all its coordinates."""
    found = {}
    for name, kept in store.state_dict().items():
        assert kept[key].shape == SHAPES[name]
        assert len(set(kept[key].reshape(-1).tolist())) == 1
        found[name] = float(kept[key].reshape(-1)[0])
    return found


@pytest.fixture
def store() -> StateStore:
    return StateStore([FIELD], SHAPES)


def test_starts_with_zeros_and_a_spare_slot(store: StateStore) -> None:
    assert amounts(store) == {"a": 0, "b": 0, "c": 0}
    assert store.get("a") == {}
    state = store.open(0, {RESIDUAL: cut("a", "b")}, torch.float64, CPU)
    assert state.before[RESIDUAL].tolist() == [0.0] * 8
    assert state.after[RESIDUAL].shape == (8,)
    assert state.after[RESIDUAL].dtype == torch.float64


def test_commit_keeps_the_step(store: StateStore) -> None:
    add(store, 1, "a", "b")
    add(store, 10, "a", "b")
    assert amounts(store) == {"a": 11, "b": 11, "c": 0}


def test_open_step_is_not_seen(store: StateStore) -> None:
    add(store, 1, "a")
    begin(store, 10, "a")
    assert amounts(store)["a"] == 1


def test_discard_leaves_no_trace(store: StateStore) -> None:
    add(store, 1, "a")
    begin(store, 10, "a")
    store.discard()
    store.commit()  # nothing is open
    assert amounts(store)["a"] == 1
    add(store, 100, "a")
    assert amounts(store)["a"] == 101


def test_units_commit_together(store: StateStore) -> None:
    begin(store, 1, "a", unit=0)
    begin(store, 2, "b", unit=1)
    assert amounts(store) == {"a": 0, "b": 0, "c": 0}
    store.commit()
    assert amounts(store) == {"a": 1, "b": 2, "c": 0}


def test_undo_takes_back_the_last_step_once(store: StateStore) -> None:
    add(store, 1, "a", "b")
    add(store, 10, "a", "b")
    assert store.undo()
    assert amounts(store) == {"a": 1, "b": 1, "c": 0}
    assert not store.undo()
    assert amounts(store) == {"a": 1, "b": 1, "c": 0}


def test_undo_is_too_late_when_the_next_step_has_begun(store: StateStore) -> None:
    add(store, 1, "a")
    begin(store, 10, "a")
    assert not store.undo()
    store.discard()
    assert amounts(store)["a"] == 1


def test_parameters_are_found_by_name_in_other_units(store: StateStore) -> None:
    """DDP rebuilds its buckets after the first step."""
    begin(store, 1, "a", "b", unit=0)
    begin(store, 2, "c", unit=1)
    store.commit()
    begin(store, 10, "c", "a", unit=0)
    begin(store, 20, "b", unit=1)
    store.commit()
    assert amounts(store) == {"a": 11, "b": 21, "c": 12}


def test_new_layout_survives_a_discarded_step(store: StateStore) -> None:
    add(store, 1, "a", "b", "c")
    begin(store, 10, "c", "b", "a")
    store.discard()
    assert amounts(store) == {"a": 1, "b": 1, "c": 1}
    add(store, 100, "c", "b", "a")
    assert amounts(store) == {"a": 101, "b": 101, "c": 101}


def test_parameters_are_found_when_units_change_back(store: StateStore) -> None:
    add(store, 1, "a", unit=0)
    add(store, 1, "b", unit=1)
    add(store, 10, "a", "b", unit=0)
    add(store, 100, "b", unit=1)
    assert amounts(store)["b"] == 111


def test_parameters_left_out_keep_their_memory(store: StateStore) -> None:
    add(store, 1, "a", "b")
    add(store, 10, "a")
    add(store, 100, "a", "b")
    assert amounts(store) == {"a": 111, "b": 101, "c": 0}


def test_what_is_still_to_be_applied_follows_the_rate(store: StateStore) -> None:
    add(store, 4, "a", "b", "c")
    store.follow_lr({"a": 0.5, "c": 2.0})
    assert amounts(store) == {"a": 2, "b": 4, "c": 8}
    add(store, 1, "a", "b", "c")
    assert amounts(store) == {"a": 3, "b": 5, "c": 9}


def test_a_rate_touches_only_the_fields_that_follow_it() -> None:
    store = StateStore([FIELD, VELOCITY], SHAPES)
    add(store, 4, "a", "b", "c")
    store.follow_lr({"a": 0.5})
    assert amounts(store)["a"] == 2
    assert amounts(store, "velocity")["a"] == 4


def test_every_field_follows_the_loss_scale_by_its_power() -> None:
    store = StateStore([FIELD, VELOCITY, SQUARES, AGE], SHAPES)
    add(store, 4, "a", "b")
    store.follow_loss_scale(0.5)
    kept = [amounts(store, field.key) for field in store.fields]
    assert kept == [{"a": n, "b": n, "c": 0} for n in (2, 2, 1, 4)]


def test_scale_reaches_what_is_not_laid_out_yet(store: StateStore) -> None:
    store.follow_lr({"a": 0.5})  # nothing there yet
    store.load_state_dict(full(6.0))
    store.follow_lr({"a": 0.5})
    assert amounts(store) == {"a": 3, "b": 6, "c": 6}


def test_what_undo_brings_back_is_in_the_new_unit_too() -> None:
    store = StateStore([FIELD, SQUARES, AGE], SHAPES)
    add(store, 4, "a", "b")
    add(store, 4, "a", "b")
    store.follow_loss_scale(0.5)
    store.follow_lr({"a": 0.25})
    assert store.undo()
    assert amounts(store) == {"a": 0.5, "b": 2, "c": 0}
    assert amounts(store, SQUARES.key) == {"a": 1, "b": 1, "c": 0}
    assert amounts(store, AGE.key) == {"a": 4, "b": 4, "c": 0}


def full(amount: float, *fields: str) -> Saved:
    return {
        name: {field: torch.full(shape, float(amount)) for field in fields or (RESIDUAL,)}
        for name, shape in SHAPES.items()
    }


def test_state_is_a_copy(store: StateStore) -> None:
    add(store, 1, "a", "b")
    state = store.state_dict()
    state["a"][RESIDUAL].fill_(99)
    assert amounts(store)["a"] == 1
    add(store, 1, "a", "b")
    assert state["b"][RESIDUAL].tolist() == [1, 1, 1]


def test_loaded_state_is_a_copy_and_replaces_all(store: StateStore) -> None:
    add(store, 1, "a", "b", "c")
    state = full(5.0)
    store.load_state_dict(state)
    state["a"][RESIDUAL].fill_(99)
    assert amounts(store) == {"a": 5, "b": 5, "c": 5}
    assert not store.undo()
    add(store, 1, "c", "a")
    assert amounts(store) == {"a": 6, "b": 5, "c": 6}


def test_load_ends_an_open_step(store: StateStore) -> None:
    begin(store, 1, "a")
    store.load_state_dict(full(5.0))
    store.commit()
    assert amounts(store)["a"] == 5


def test_squared_norms(store: StateStore) -> None:
    assert store.squared_norms() == {"a": 0, "b": 0, "c": 0}
    add(store, 2, "a", "c")
    assert store.squared_norms() == {"a": 16, "b": 0, "c": 4}
    assert StateStore([], SHAPES).squared_norms() == {}


def test_without_fields_nothing_is_kept() -> None:
    store = StateStore([], SHAPES)
    state = store.open(0, {RESIDUAL: cut("a")}, torch.float32, CPU)
    assert state.before == {}
    state.after[RESIDUAL].fill_(7)
    store.commit()
    assert store.state_dict() == {"a": {}, "b": {}, "c": {}}
    store.load_state_dict({"a": {}, "b": {}, "c": {}})


def spoilt(name: str, tensor: Tensor) -> Saved:
    state = full(1.0)
    state[name][RESIDUAL] = tensor
    return state


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({}, r"lacks a, b, c: was it saved for this model\?"),
        ({"a": full(1)["a"], "c": full(1)["c"]}, "lacks b: was"),
        ({**full(1), "d": {}, "e": {}}, "contains d, e, which this model does not have"),
        ({**full(1), **{f"x{i}": {} for i in range(7)}}, "contains x0, x1, x2, x3, x4 and 2 more"),
        (
            full(1, RESIDUAL, "velocity"),
            r"a holds \['residual', 'velocity'\], .*keeps \['residual'\]",
        ),
        (full(1, "velocity"), r"of a holds \['velocity'\]"),
        ({**full(1), "b": {}}, r"of b holds \[\]"),
        (spoilt("a", torch.zeros(4)), r"residual of a has shape \(4,\), .* has \(2, 2\)"),
        (spoilt("c", torch.zeros(1)), r"residual of c has shape \(1,\), .* has \(\)"),
        (spoilt("b", torch.tensor([0, math.nan, 0])), "residual of b holds NaN or infinity"),
        (spoilt("b", torch.tensor([0, 0, -math.inf])), "residual of b holds NaN or infinity"),
        (spoilt("b", torch.ones(3, dtype=torch.bool)), "residual of b is a tensor of another kind"),
        (spoilt("b", torch.ones(3, dtype=torch.int64)), r"kind \(torch.int64, torch.strided\)"),
        (spoilt("b", torch.ones(3, dtype=torch.complex64)), "pass what it returned, unchanged"),
        (spoilt("b", torch.ones(3).to(torch.float8_e5m2)), "tensor of another kind"),
        (spoilt("b", torch.ones(3).to_sparse()), "torch.float32, torch.sparse_coo"),
        (spoilt("b", torch.ones(3, device="meta")), "on the meta device"),
        ({**full(1), 7: {}}, "contains 7, which"),
        ({**full(1), "b": {RESIDUAL: torch.ones(3), 7: torch.ones(3)}}, r"holds \['7', 'resid"),
    ],
)
def test_state_that_does_not_fit_is_refused_whole(
    store: StateStore, state: Saved, reason: str
) -> None:
    add(store, 3, "a", "b", "c")
    with pytest.raises(sw.errors.StateError, match=reason):
        store.load_state_dict(state)
    assert amounts(store) == {"a": 3, "b": 3, "c": 3}
    with pytest.raises(sw.errors.StateError, match=reason):
        store.check(state)


def test_the_norm_of_a_large_residual_is_estimated_in_less_than_a_copy() -> None:
    shapes = {"a": (2000, 1003), "b": (3000, 2001)}
    store = StateStore([FIELD], shapes)
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        layout = {RESIDUAL: Segments.partition({name: shape}, sw.TopK(0.01))}
        store.open(name, layout, torch.float32, CPU).after[RESIDUAL].normal_(generator=generator)
        store.commit()
    exact = math.sqrt(sum(store.squared_norms().values()))
    assert store.estimated_norm() == pytest.approx(exact, rel=0.02)

    kept = [store.get(name)[RESIDUAL] for name in shapes]
    ratios = []
    for _ in range(9):
        start = time.perf_counter()
        store.estimated_norm()
        middle = time.perf_counter()
        for tensor in kept:
            tensor.clone()
        ratios.append((middle - start) / (time.perf_counter() - middle))
    assert statistics.median(ratios) < 1


def test_norms_are_those_of_workers_and_owners_together() -> None:
    shapes = {"w": (50, 40)}
    store = StateStore([FIELD, VELOCITY, SHARE], shapes, rank=1, world_size=3)
    length = owned("w", 2000, 1, 3)
    layout = {
        RESIDUAL: Segments.partition(shapes, sw.TopK(0.5)),
        VELOCITY.key: Segments.partition(shapes, sw.TopK(0.5)),
        OWNED: Segments.partition({"w": (length,)}, sw.TopK(0.5)),
    }
    state = store.open(0, layout, torch.float32, CPU)
    for key, amount in ((RESIDUAL, 2.0), (VELOCITY.key, 7.0), (OWNED, 3.0)):
        state.after[key][:-1] = amount
    store.commit()
    assert store.state_dict()["w"][OWNED].shape == (length,)
    squares = 4.0 * 2000 + 9.0 * length
    assert store.squared_norms() == pytest.approx({"w": squares})
    assert store.estimated_norm() == pytest.approx(math.sqrt(squares))


def test_one_field_may_be_committed_alone() -> None:
    store = StateStore([FIELD, VELOCITY], SHAPES)
    add(store, 1, "a")
    begin(store, 10, "a")
    store.commit_only(RESIDUAL)
    assert (amounts(store)["a"], amounts(store, "velocity")["a"]) == (11, 1)
    assert store.undo()
    assert (amounts(store)["a"], amounts(store, "velocity")["a"]) == (1, 1)


def test_what_is_not_persistent_is_not_saved_and_begins_at_zero() -> None:
    scratch = StateField("scratch", persistent=False)
    store = StateStore([FIELD, scratch], SHAPES)
    add(store, 1, "a", "b", "c")
    assert store.get("a")["scratch"].eq(1).all()
    saved = store.state_dict()
    assert saved.keys() == SHAPES.keys()
    assert all(kept.keys() == {RESIDUAL} for kept in saved.values())
    store.load_state_dict(saved)
    begin(store, 0, "a")
    assert not store.get("a")["scratch"].any()
    assert store.get("a")[RESIDUAL].eq(1).all()


def test_a_fork_goes_its_own_way(store: StateStore) -> None:
    add(store, 1, "a", "b")
    kept = store.get("a")[RESIDUAL]
    fork = store.fork()
    assert fork.get("a")[RESIDUAL].data_ptr() == kept.data_ptr()  # no copy
    for amount in (10, 100):
        add(fork, amount, "a", "b")
        fork.release()  # or the second step would write where both began
    assert amounts(store) == {"a": 1, "b": 1, "c": 0}
    assert amounts(fork) == {"a": 111, "b": 111, "c": 0}
    add(store, 5, "b", "a")
    assert amounts(fork)["a"] == 111


def test_released_tensors_cannot_be_undone(store: StateStore) -> None:
    add(store, 1, "a")
    add(store, 10, "a")
    store.release()
    assert not store.undo()
    add(store, 100, "a")
    assert amounts(store)["a"] == 111


# -- another number of ranks -----------------------------------------------------------------------

RESIZED = [(1, 3), (3, 1), (2, 4), (4, 2), (3, 4), (4, 4)]
CHAIN = (4, 2, 3, 8)
CLOSE = {"rtol": 2 * EPS, "atol": 2 * EPS}


def resized(crew: Crew, world_size: int) -> Crew:
    """As many other ranks, which go on where the ranks of this crew stopped."""
    other = Crew(crew.scheme, world_size, crew.shapes)
    saved = [store.state_dict() for store in crew.stores]
    for rank, store in enumerate(other.stores):
        fields = other.scheme.fields
        store.load_state_dict(resize(saved, fields, crew.shapes, rank, world_size))
    other.step = crew.step
    return other


def mean_of(crew: Crew, key: str) -> Tensor:
    """The mean over ranks of a field that all of them keep of all coordinates."""
    return torch.stack([crew.remembered(rank, key) for rank in range(crew.world_size)]).mean(dim=0)


@pytest.mark.parametrize(("old", "new"), RESIZED)
@pytest.mark.parametrize(
    "scheme",
    [
        sw.Scheme(sw.TopK(0.1), dense_below=64),
        sw.Scheme(sw.TopK(0.1), dense_below=64, memory=sw.MomentumCorrection(0.5)),
        sw.Scheme(sw.TopK(0.1), dense_below=64, collective=sw.Sharded()),
        sw.Scheme(sw.TopK(0.1), dense_below=64, collective=sw.Sharded(), values=sw.OneBit()),
    ],
    ids=label,
)
def test_another_world_size_keeps_the_mean_residual(scheme: sw.Scheme, old: int, new: int) -> None:
    """A step applies 1/W of what the ranks send in all, so that is what they still owe."""
    crew = Crew(scheme, old)
    for step in range(3):
        crew.exchange(noise(old, crew.size, step))
    other = resized(crew, new)
    assert crew.owed().any()
    torch.testing.assert_close(other.owed() / new, crew.owed() / old, **CLOSE)
    assert torch.equal(other.owned(), crew.owned())
    for key in {field.key for field in scheme.fields if field.extent == "coordinate"}:
        torch.testing.assert_close(mean_of(other, key), mean_of(crew, key), **CLOSE)
    other.exchange(noise(new, crew.size, 3))


MEMORIES = [
    *examples("memory"),
    sw.ErrorFeedback(decay=0.9),
    sw.MomentumCorrection(dtype="bfloat16"),
]


def chained() -> Iterator[sw.Scheme]:
    """Every memory with every collective, and selectors that it goes with."""
    for memory, collective in itertools.product(MEMORIES, examples("collectives")):
        for selector in (sw.TopK(0.1), sw.LeaderTopK(0.1), sw.RandomK(0.1, shared=False)):
            with contextlib.suppress(sw.errors.SchemeError):
                yield sw.Scheme(selector, memory=memory, collective=collective, dense_below=64)


@pytest.mark.parametrize("scheme", list(chained()), ids=label)
def test_nothing_is_lost_from_four_ranks_to_two_to_three_to_eight(scheme: sw.Scheme) -> None:
    """What gradients brought in the mean = what was applied + Σe/W, in every memory and way."""
    crew = Crew(scheme, CHAIN[0])
    is_narrow = scheme.memory.dtype == "bfloat16"
    precision = 2.0**-8 if is_narrow else 1e-6
    is_plain = isinstance(scheme.memory, sw.ErrorFeedback) and scheme.memory.decay == 1
    owing = torch.zeros(crew.size, dtype=torch.float64)  # brought and not applied
    for size in CHAIN:
        before = crew
        crew = resized(crew, size)
        owed = before.owed() / before.world_size
        assert is_narrow or within(crew.owed() / size, owed, 1e-6 * owed.abs().clamp(min=1))
        assert torch.equal(crew.owned(), before.owned())
        for field in scheme.fields:
            if field.extent == "coordinate":
                kept = mean_of(before, field.key)
                assert within(mean_of(crew, field.key), kept, precision * kept.abs().clamp(min=1))
        for _ in range(3):
            gradients = noise(size, crew.size, crew.step)
            mean = crew.exchange(gradients)[0]
            owing += torch.stack(gradients).double().mean(dim=0) - mean.double()
        if is_plain and not is_narrow:
            assert within(crew.owed() / size, owing, 1e-6 * max(1.0, float(owing.abs().max())))
    assert bool(scheme.memory.fields) == bool(crew.owed().any())


def test_fields_are_merged_as_they_say() -> None:
    """Rank 0 of 2 holds 1, rank 1 holds 5."""
    ways = ("sum", "mean", "reset")
    fields = [StateField(way, resize=way) for way in ways]  # type: ignore[arg-type]
    fields += [replace(field.for_owner, key=f"my {field.key}") for field in fields]
    fields.append(StateField("scratch", persistent=False))
    shapes = {"w": (10, 7), "scalar": (), "nothing": (0,)}
    saved = [
        {
            name: {key: tensor + amount for key, tensor in held.items()}
            for name, held in StateStore(fields, shapes, rank, 2).state_dict().items()
        }
        for rank, amount in enumerate((1.0, 5.0))
    ]
    new = [resize(saved, fields, shapes, rank, 3) for rank in range(3)]
    for rank, state in enumerate(new):
        StateStore(fields, shapes, rank, 3).check(state)
        for name in ("w", "scalar"):
            for way, amount in zip(ways, (2.0, 3.0, 0.0), strict=True):
                assert state[name][way].eq(amount).all()
            assert not state[name]["my reset"].any()
    for key in ("my sum", "my mean"):  # every coordinate has one value, wherever it is
        held = [torch.cat([state["w"][key] for state in states]) for states in (saved, new)]
        assert torch.equal(held[0].sort().values, held[1].sort().values)


def test_the_same_number_of_ranks_goes_on_with_the_same() -> None:
    saved = [full(1.0), full(2.0)]
    again = [resize(saved, [FIELD], SHAPES, rank, 2) for rank in range(2)]
    assert [state["a"][RESIDUAL][0, 0] for state in again] == [1, 2]
    again[0]["a"][RESIDUAL].zero_()
    assert saved[0]["a"][RESIDUAL].all()


def test_owners_that_there_were_not_have_nothing_to_hand_over() -> None:
    for rank in range(3):
        state = resize([full(1.0), full(2.0)], [FIELD, SHARE], SHAPES, rank, 3)
        assert state["b"].keys() == {RESIDUAL}
        StateStore([FIELD, SHARE], SHAPES, rank, 3).check(state)


def test_state_that_does_not_fit_is_not_resized() -> None:
    with pytest.raises(sw.errors.StateError, match="residual of b holds NaN"):
        resize([full(1.0), spoilt("b", torch.full((3,), math.nan))], [FIELD], SHAPES, 0, 3)
    for saved, rank, world_size in (([], 0, 2), ([full(1.0)], 0, 0), ([full(1.0)], 2, 2)):
        with pytest.raises(sw.errors.StateError, match="ranks cannot be resized for"):
            resize(saved, [FIELD], SHAPES, rank, world_size)
