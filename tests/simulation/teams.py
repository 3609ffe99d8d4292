"""Ranks that exchange gradients or updates, and what they hold: numbers whose sums are exact."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import sparsewire as sw
from sparsewire.adapters.updates import Updates
from sparsewire.counters import Counters
from sparsewire.exchange import NonFinite
from sparsewire.requests import Routine
from sparsewire.segments import ParamSlice
from sparsewire.session import Session, Topology
from sparsewire.state import OWNED, RESIDUAL

from ..laws.cases import owned_places
from .network import Network

SIZE = 4  # so that a mean of whole numbers is exact
SHAPES = {"weight": (12, 10), "bias": (5,), "other": (9, 8)}
BUCKETS = (("weight", "bias"), ("other",))
STEPS = 4
CPU = torch.device("cpu")
MACHINES = {"intra_node": [[0, 1], [2, 3]], "exchange": [[0, 2]], "status": [[0, 2]]}


def whole_numbers(shape: tuple[int, ...], *seeds: int) -> Tensor:
    """Small whole numbers as float32."""
    generator = torch.Generator().manual_seed(sum(s * 1000**n for n, s in enumerate(seeds)))
    return torch.randint(-50, 50, shape, generator=generator).float()


@dataclass(frozen=True)
class Scenario:
    """What ranks do in every step.

    Arguments:
        scheme: what they exchange.
        machines: two machines of two ranks take part as one rank each.
        skips_unused: see `Exchange`.
        every: local steps between two exchanges of updates; None for gradients.
        step_ahead: λ of updates. If it is not 0, sums are not exact.
    """

    scheme: str
    machines: bool = False
    skips_unused: bool = False
    every: int | None = None
    step_ahead: Any = 0.0

    @property
    def topologies(self) -> list[Topology]:
        if self.machines:
            return [Topology(rank // 2, 2, rank % 2, 2) for rank in range(SIZE)]
        return [Topology(rank, SIZE) for rank in range(SIZE)]

    def network(self, chance: random.Random) -> Network:
        return Network(SIZE, chance, **(MACHINES if self.machines else {}))

    def team(self) -> Team:
        return GradientTeam(self) if self.every is None else UpdateTeam(self)


class Team(ABC):
    """Four ranks that train together."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.sessions = [
            Session(sw.parse(scenario.scheme), SHAPES, place, skips_unused=scenario.skips_unused)
            for place in scenario.topologies
        ]

    @property
    def all_counters(self) -> list[Counters]:
        return [session.counters for session in self.sessions]

    @abstractmethod
    def begin(self, step: int, bad_rank: int | None = None) -> None:
        """Compute what a step exchanges; with NaN on one rank, if it is bad."""

    @abstractmethod
    def routine(self, rank: int) -> Routine[Any]:
        """One rank's part in the exchange; returns what all ranks should hold then."""

    @abstractmethod
    def end(self, took_part: bool) -> None:
        """All ranks have ended the step; what they computed was taken or kept, or was dropped."""

    @abstractmethod
    def is_in_balance(self) -> bool:
        """Whether accumulated = applied + residual."""

    def held(self, rank: int) -> list[Tensor]:
        """All that a rank keeps for later steps."""
        kept = self.sessions[rank].store.state_dict()
        return [tensor for fields in kept.values() for tensor in fields.values()]

    def owed(self) -> dict[str, Tensor]:
        """What all ranks have not sent yet."""
        owed = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for session in self.sessions:
            place = session.topology
            for name, total in owed.items() if place.leads else ():
                kept = session.store.get(name)
                total += kept.get(RESIDUAL, torch.zeros(SHAPES[name])).double()
                if OWNED in kept:
                    param = ParamSlice(name, SHAPES[name], 0)
                    at = torch.tensor(owned_places(param, place.rank, place.world_size))
                    total.view(-1)[at.long()] += place.world_size * kept[OWNED].double()
        return owed

    def balance(self, accumulated: Mapping[str, Tensor], applied: Mapping[str, Tensor]) -> bool:
        """Whether the law holds for sums over all ranks, and for the mean that all applied."""
        owed, place = self.owed(), self.sessions[0].topology
        return all(
            torch.equal(
                accumulated[name].double() / place.local_world_size,
                applied[name].double() * place.world_size + owed[name],
            )
            for name in SHAPES
        )


class GradientTeam(Team):
    """Exchanges gradients in two buckets."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.accumulated = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.applied = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self._means: dict[str, Tensor] = {}

    def begin(self, step: int, bad_rank: int | None = None) -> None:
        self._gradients = [
            {
                name: whole_numbers(shape, rank, step, n)
                for n, (name, shape) in enumerate(SHAPES.items())
            }
            for rank in range(SIZE)
        ]
        if self.scenario.skips_unused and step % 2:
            for gradients in self._gradients:
                gradients["other"].zero_()
        self._sums = {n: sum(g[n] for g in self._gradients) for n in SHAPES}
        if bad_rank is not None:
            self._gradients[bad_rank]["other"][3, 3] = float("nan")

    def routine(self, rank: int) -> Routine[NonFinite | list[Tensor]]:
        transaction = self.sessions[rank].begin()
        means = {}
        for bucket, names in enumerate(BUCKETS):
            shapes = {name: SHAPES[name] for name in names}
            unit = transaction.unit(bucket, shapes, torch.float32, CPU)
            for name, view in unit.views():
                view.copy_(self._gradients[rank][name])
            yield from transaction.exchange(unit, bucket)
            means |= {name: view.clone() for name, view in unit.views()}
        found = yield from transaction.agree()
        if found is not None:
            transaction.rollback()
            return found
        transaction.commit()
        self._means = means
        return list(means.values())

    def end(self, took_part: bool) -> None:
        if not took_part:
            return
        unused = self.scenario.skips_unused
        for name in SHAPES:
            if unused and not self._sums[name].any():
                continue  # left out, state included
            self.accumulated[name] += self._sums[name]
            self.applied[name] += self._means[name]

    def is_in_balance(self) -> bool:
        return self.balance(self.accumulated, self.applied)


class UpdateTeam(Team):
    """Exchanges updates of SGD with a learning rate of 1, and buffers."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._accumulated = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self._start = {name: whole_numbers(shape, 99) for name, shape in SHAPES.items()}
        self._models: list[dict[str, nn.Parameter]] = []
        self._buffers = [torch.full((3,), float(rank)) for rank in range(SIZE)]
        self.updates: list[Updates] = []
        for session, buffer in zip(self.sessions, self._buffers, strict=True):
            model = {name: nn.Parameter(value.clone()) for name, value in self._start.items()}
            self._models.append(model)
            ahead = scenario.step_ahead
            self.updates.append(Updates(session, model, step_ahead=ahead, buffers=[buffer]))

    def begin(self, step: int, bad_rank: int | None = None) -> None:
        self._sums = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        assert self.scenario.every is not None
        for rank, model in enumerate(self._models):
            self._buffers[rank].fill_(10 * step + rank)
            for n, (name, parameter) in enumerate(model.items()):
                for local in range(self.scenario.every):
                    gradient = whole_numbers(SHAPES[name], rank, step, n, local + 1)
                    parameter.data -= gradient
                    self._sums[name] += gradient
        self.updates[bad_rank or 0].bad = None if bad_rank is None else "other"

    def routine(self, rank: int) -> Routine[NonFinite | list[Tensor]]:
        updates = self.updates[rank]
        found = yield from updates.round()
        if found is not None:
            return found
        shared, buffer = updates.weights.shared.clone(), self._buffers[rank].clone()
        return [shared, buffer, torch.tensor(updates.ahead)]

    def end(self, took_part: bool) -> None:
        if took_part:
            for name, total in self._accumulated.items():
                total += self._sums[name]

    def held(self, rank: int) -> list[Tensor]:
        return [*super().held(rank), self.updates[rank].weights.shared]

    def is_in_balance(self) -> bool:
        if self.scenario.step_ahead:
            return True
        weights = self.updates[0].weights
        shared = weights.values(weights.shared)
        applied = {name: self._start[name] - shared[name] for name in SHAPES}
        return self.balance(self._accumulated, applied)


@cache
def undisturbed(
    scenario: Scenario,
) -> list[tuple[list[Tensor], list[list[Tensor]], int, list[int]]]:
    """What every step gives if nothing goes wrong: what all ranks hold, what each keeps, and how
    many requests are carried, and made by each rank."""
    team, steps = scenario.team(), []
    counting = scenario.network(random.Random(0))
    for step in range(STEPS):
        team.begin(step)
        counting.count = 0
        made = [0] * SIZE
        runs = [_counted(team.routine(rank), made, rank) for rank in range(SIZE)]
        results = counting.drive(runs, team.all_counters)
        team.end(True)
        assert team.is_in_balance()
        held = [[tensor.clone() for tensor in team.held(rank)] for rank in range(SIZE)]
        steps.append((results[0], held, counting.count, made))
    return steps


def _counted(routine: Routine[Any], made: list[int], rank: int) -> Routine[Any]:
    answer: Any = None
    try:
        while True:
            step = routine.send(answer)
            made[rank] += 1
            answer = yield step
    except StopIteration as end:
        return end.value
