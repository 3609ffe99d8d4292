"""A small training problem that NumPy, `simulate` and `Updates` all walk through.

Worker w pulls elementwise towards a centre of its own that moves a little from step to step, so
the gradient's bits do not depend on who computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import sparsewire as sw
from sparsewire.adapters.scaling import Scaling
from sparsewire.scheme import AnyScheme

from .cases import Crew
from .meeting import Make, Team, sgd
from .twins import Array

SHAPES = {"first": (6, 5), "second": (4, 5)}
LAYERS = (slice(0, 30), slice(30, 50))
SIZE = 50
START: Array = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
_WEIGHTS = np.random.default_rng(1).uniform(0.5, 1.5, SIZE).astype(np.float32)
_CENTRES = np.random.default_rng(2).normal(size=(8, SIZE)).astype(np.float32)
_DRIFT = np.random.default_rng(3).normal(size=(100, SIZE)).astype(np.float32)


def gradient(x: Array, worker: int, step: int) -> Array:
    """Worker `worker`'s gradient at x."""
    return _WEIGHTS * (x - _CENTRES[worker] - np.float32(0.3) * _DRIFT[step])


def named(flat: Array) -> dict[str, Tensor]:
    """A flat vector by parameter name."""
    tensor = torch.from_numpy(flat.copy())
    return {
        name: tensor[layer].view(shape)
        for (name, shape), layer in zip(SHAPES.items(), LAYERS, strict=True)
    }


def flat(tensors: Sequence[Tensor]) -> Array:
    """Tensors in the order of `SHAPES` as one vector."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).numpy().copy()


def walk_simulated(
    scheme: AnyScheme,
    workers: int,
    rates: Sequence[float],
    inside: bool = False,
    rescale: bool = False,
) -> Array:
    """By `simulate`: γ times the gradient is exchanged (`inside`), or the gradient alone.

    `rescale`: the memory is multiplied by γ_old / γ_new when the rate changes.
    """
    x = START
    states = [sw.functional.init(scheme, named(x)) for _ in range(workers)]
    path, last = [], rates[0]
    for step, rate in enumerate(rates):
        if rescale and rate != last:
            states = [_multiplied(state, last / rate) for state in states]
        last = rate
        before, after = (rate, 1.0) if inside else (1.0, rate)
        gradients = [named(np.float32(before) * gradient(x, w, step)) for w in range(workers)]
        mean, states = sw.functional.simulate(gradients, states)
        x = x - np.float32(after) * flat([mean[name] for name in SHAPES])
        path.append(x)
    return np.stack(path)


def _multiplied(state: sw.functional.State, factor: float) -> sw.functional.State:
    memory = {
        name: {field: tensor * factor for field, tensor in kept.items()}
        for name, kept in state.memory.items()
    }
    return replace(state, memory=memory)


def walk_following(scheme: AnyScheme, workers: int, rates: Sequence[float]) -> Array:
    """By gradients, the memory kept in their unit by `Scaling`, as `attach(follow_lr=True)`."""
    crew = Crew(scheme, workers, SHAPES)
    model = make_model()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=rates[0])
    scalings = [Scaling(parameters, optimizer, None) for _ in range(workers)]
    x, path = START, []
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        for scaling, store in zip(scalings, crew.stores, strict=True):
            scaling.follow(store)
        gradients = [torch.from_numpy(gradient(x, w, step)) for w in range(workers)]
        x = x - np.float32(rate) * crew.exchange(gradients)[0].numpy()
        path.append(x)
    return np.stack(path)


def make_model() -> nn.Module:
    """The start as a module with two parameters."""
    model = nn.Module()
    for name, tensor in named(START).items():
        model.register_parameter(name, nn.Parameter(tensor))
    return model


def walk_updates(
    scheme: AnyScheme,
    workers: int,
    rates: Sequence[float],
    make: Make | None = None,
    **options: Any,
) -> list[Array]:
    """By `Updates` and optimizers, one of each per rank; every rank's shared weights by round."""
    team = Team(
        scheme,
        workers,
        make or sgd(rates[0]),
        shapes=SHAPES,
        values=named(START),
        pull=lambda x, worker, step: torch.from_numpy(gradient(x.numpy(), worker, step)),
        **options,
    )
    paths: list[list[Array]] = [[] for _ in range(workers)]
    for rate in rates:
        for rank in team.ranks:
            rank.optimizer.param_groups[0]["lr"] = rate
        assert team.round() is None
        for rank, path in zip(team.ranks, paths, strict=True):
            path.append(rank.shared.numpy())
    return [np.stack(path) for path in paths]
