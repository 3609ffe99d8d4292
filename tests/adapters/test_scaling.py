"""What is kept follows learning rates and a GradScaler's scale."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import sparsewire as sw
from sparsewire.adapters.scaling import Scaling
from sparsewire.state import StateStore

FIELDS = sw.MomentumCorrection().fields
UNITS = (math.nan, math.inf, -math.inf, 0.0, -0.5, 1e-320)  # which are none
PARAMETERS = {"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(3))}


@pytest.fixture
def store() -> StateStore:
    """A store that holds 8 everywhere."""
    store = StateStore(FIELDS, {name: tuple(p.shape) for name, p in PARAMETERS.items()})
    store.load_state_dict(
        {n: {f.key: torch.full(p.shape, 8.0) for f in FIELDS} for n, p in PARAMETERS.items()}
    )
    return store


def held(store: StateStore) -> dict[str, tuple[float, ...]]:
    """Residual and velocity of each parameter."""
    kept = store.state_dict()
    return {name: tuple(float(kept[name][f.key][0]) for f in FIELDS) for name in kept}


def optimizer_with(rates: Sequence[float]) -> torch.optim.Optimizer:
    groups = [
        {"params": [parameter], "lr": rate}
        for parameter, rate in zip(PARAMETERS.values(), rates, strict=True)
    ]
    return torch.optim.SGD(groups, lr=1.0)


def follow_rates(scaling: Scaling, store: StateStore, optimizer: object, *steps: float) -> None:
    """One step for each of these rates of the first group."""
    for rate in steps:
        optimizer.param_groups[0]["lr"] = rate  # type: ignore[attr-defined]
        scaling.follow(store)


def test_first_rate_only_sets_the_unit(store: StateStore) -> None:
    optimizer = optimizer_with([0.1, 0.2])
    Scaling(PARAMETERS, optimizer, None).follow(store)
    assert held(store) == {"a": (8, 8), "b": (8, 8)}


def test_drop_multiplies_the_residual_of_its_group_alone(store: StateStore) -> None:
    optimizer = optimizer_with([0.5, 0.5])
    scaling = Scaling(PARAMETERS, optimizer, None)
    follow_rates(scaling, store, optimizer, 0.5, 0.25, 0.25)
    assert held(store) == {"a": (16, 8), "b": (8, 8)}  # momentum is a gradient, not an update
    follow_rates(scaling, store, optimizer, 1.0)
    assert held(store) == {"a": (4, 8), "b": (8, 8)}


def test_rate_of_zero_is_passed_over(store: StateStore) -> None:
    optimizer = optimizer_with([0.5, 0.5])
    scaling = Scaling(PARAMETERS, optimizer, None)
    follow_rates(scaling, store, optimizer, 0.5, 0.0, 0.25)
    assert held(store)["a"] == (16, 8)


def test_rates_that_are_tensors(store: StateStore) -> None:
    optimizer = optimizer_with([0.5, 0.5])
    scaling = Scaling(PARAMETERS, optimizer, None)
    scaling.follow(store)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    scaling.follow(store)
    assert held(store)["a"] == (16, 8)


def test_parameters_of_other_models_are_passed_over(store: StateStore) -> None:
    optimizer = optimizer_with([0.5, 0.5])
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.5})
    scaling = Scaling(PARAMETERS, optimizer, None)
    scaling.follow(store)
    optimizer.param_groups[2]["lr"] = 0.1
    scaling.follow(store)
    assert held(store) == {"a": (8, 8), "b": (8, 8)}


def test_new_scale_multiplies_all_that_is_kept(store: StateStore) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaling = Scaling(PARAMETERS, None, scaler)
    scaling.follow(store)
    assert held(store)["a"] == (8, 8)
    scaler.scale(torch.ones(1))
    scaler.update(512.0)
    scaling.follow(store)
    scaling.follow(store)
    assert held(store) == {"a": (4, 4), "b": (4, 4)}


def test_without_either_nothing_happens(store: StateStore) -> None:
    Scaling(PARAMETERS, None, None).follow(store)
    assert held(store) == {"a": (8, 8), "b": (8, 8)}


GOOD = {"rates": {"a": 0.5, "b": 0.25}, "scale": 1024.0}


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"rates": {}},
        {"scale": 1.0},
        {"rates": [0.5], "scale": None},
        *({**GOOD, "scale": scale} for scale in (*UNITS, 1024, "1", False)),
        *({**GOOD, "rates": {"a": 0.5, "b": rate}} for rate in (*UNITS, 1, None)),
    ],
    ids=str,
)
def test_a_unit_that_no_memory_can_be_in_is_refused(state: object) -> None:
    with pytest.raises(sw.errors.StateError, match="learning rates or loss scale are not positive"):
        Scaling.check(state)


def test_units_that_a_memory_can_be_in() -> None:
    for state in (GOOD, {**GOOD, "scale": None}, {"rates": {}, "scale": 1e-38}):
        Scaling.check(state)


def test_resumed_scaling_knows_the_old_unit(store: StateStore) -> None:
    """A run that is resumed with another rate rescales what it held back before."""
    optimizer = optimizer_with([0.5, 0.5])
    scaling = Scaling(PARAMETERS, optimizer, None)
    scaling.follow(store)
    resumed = Scaling(PARAMETERS, optimizer, None)
    resumed.load(scaling.state())
    follow_rates(resumed, store, optimizer, 0.25)
    assert held(store)["a"] == (16, 8)
    assert scaling.state()["rates"]["a"] == 0.5  # not shared with the resumed one
