"""One schedule: a few steps in which, as a seed decides, something goes wrong; and what must hold.

1. All ranks hold the same bits, those of a run in which nothing went wrong, or all have raised.
2. An error that all ranks raise alike has changed nothing, and the step can be repeated.
3. Any other error breaks the group: no rank can take another step.
4. Accumulated = applied + residual, exactly.
5. An error names the rank that caused it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.exchange import NonFinite

from .network import Corruption, Killed, Unknown, Violation, until
from .teams import SIZE, STEPS, Scenario, undisturbed

Outcomes = Sequence[Any]


@dataclass
class Faults:
    """What goes wrong in one attempt of a step."""

    corruption: Corruption | None = None
    crash: tuple[int, int, Exception] | None = None  # rank, after so many requests, how
    bad_rank: int | None = None  # has NaN in its gradient
    late_rank: int | None = None  # is a step ahead

    def __bool__(self) -> bool:
        return any(each is not None for each in vars(self).values())


@dataclass
class Schedule:
    """What a seed decides for one scenario."""

    scenario: Scenario
    seed: int
    story: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(f"{self.scenario} {self.seed}")
        self.team = self.scenario.team()
        self.network = self.scenario.network(self.chance)
        self.follows_twin = True  # not after updates that were sent late, or rounded otherwise

    def play(self) -> None:
        """Play all steps; whatever must not happen raises a `Violation` that tells the story."""
        try:
            self._play()
        except Exception as error:
            story = "\n".join([f"{self.scenario}, seed {self.seed}", *self.story])
            raise Violation(f"{error!r}\n{story}") from error

    def _play(self) -> None:
        for step in range(STEPS):
            faults = self._faults(step)
            if faults and not self._attempt(step, faults):
                if self.network.broken is not None:
                    self._check_that_it_is_over(step)
                    return
                self._attempt(step, Faults())
            elif not faults:
                self._attempt(step, faults)
            if not self.team.is_in_balance():
                raise Violation("accumulated is not applied + residual")

    def _faults(self, step: int) -> Faults:
        """Let chance decide what goes wrong in a step."""
        _, _, count, made = undisturbed(self.scenario)[step]
        chance, faults = self.chance, Faults()
        corrupt = ["corrupt"]
        kinds = chance.choice(([], corrupt, corrupt, corrupt, ["crash"], ["bad"], ["late"], None))
        if kinds is None:
            kinds = chance.sample(["corrupt", "crash", "bad"], 2)
        if self.scenario.every is not None and "bad" in kinds:
            kinds = ["bad"]  # a deferred update would be dropped for it
        if "corrupt" in kinds:
            faults.corruption = Corruption(chance.randrange(count), chance.random() < 0.5)
        if "crash" in kinds:
            rank = chance.randrange(SIZE)
            kind = chance.choice((Killed, Unknown, MemoryError))
            faults.crash = rank, chance.randrange(made[rank]), kind("no room left")
        if "bad" in kinds:
            faults.bad_rank = chance.randrange(SIZE)
        if "late" in kinds:
            faults.late_rank = chance.randrange(SIZE)
        return faults

    def _attempt(self, step: int, faults: Faults) -> bool:
        """Let all ranks try a step; returns whether they took it."""
        team, network = self.team, self.network
        before = self._held()
        team.begin(step, faults.bad_rank)
        runs = [team.routine(rank) for rank in range(SIZE)]
        if faults.crash is not None:
            rank, requests, error = faults.crash
            runs[rank] = until(runs[rank], requests, error)
        if faults.late_rank is not None:
            team.sessions[faults.late_rank].steps += 1
        network.count, network.corruption = 0, faults.corruption
        outcomes = network.outcomes(runs, team.all_counters)
        network.corruption = None
        if faults.late_rank is not None and network.broken is None:
            team.sessions[faults.late_rank].steps -= 1
        self.story.append(f"step {step}: {faults}")
        for rank, end in enumerate(outcomes):
            self.story.append(f"  rank {rank}: {'took it' if isinstance(end, list) else repr(end)}")
        return self._judge(step, faults, outcomes, before)

    def _held(self) -> list[list[Tensor]]:
        return [[tensor.clone() for tensor in self.team.held(rank)] for rank in range(SIZE)]

    def _judge(
        self, step: int, faults: Faults, outcomes: Outcomes, before: list[list[Tensor]]
    ) -> bool:
        """Check what has become of a step; returns whether it was taken."""
        errors = [end for end in outcomes if isinstance(end, sw.SparsewireError)]
        expected, after, _, _ = undisturbed(self.scenario)[step]
        held = self._held()
        if self.network.broken is not None:
            self._judge_broken(faults, outcomes, before, after)
            return False
        if not errors and not isinstance(outcomes[0], NonFinite):
            if faults.bad_rank is not None or faults.late_rank is not None:
                raise Violation("a step that no rank may take was taken")
            for rank, means in enumerate(outcomes):
                if not _same(means, outcomes[0]):
                    raise Violation(f"rank {rank} holds other numbers than rank 0")
            if self.follows_twin and not _same(outcomes[0], expected):
                raise Violation("ranks hold other numbers than if nothing had gone wrong")
            if self.follows_twin and not all(map(_same, held, after)):
                raise Violation("ranks keep other numbers than if nothing had gone wrong")
            self.team.end(True)
            return True
        kinds = {type(end) for end in outcomes}
        if len(kinds) != 1:
            raise Violation(f"ranks ended a step in different ways: {kinds}")
        if not faults:
            raise Violation("a step failed without a reason")
        self._judge_blame(faults, [str(end) for end in outcomes])
        is_deferred = kinds == {sw.errors.CorruptMessageError} and self.scenario.every is not None
        if is_deferred or self.scenario.step_ahead:
            self.follows_twin = False
        if not is_deferred and not all(map(_same, held, before)):
            raise Violation("a failed step changed what a rank keeps")
        self.team.end(is_deferred)
        return False

    def _judge_broken(
        self,
        faults: Faults,
        outcomes: Outcomes,
        before: list[list[Tensor]],
        after: list[list[Tensor]],
    ) -> None:
        if not faults.corruption and not faults.crash:
            raise Violation("the group broke without a reason")
        if not faults.crash and str(self.network.broken).startswith("the exchange cannot go on"):
            raise Violation("ranks wait for one that has raised and would begin another step")
        for rank, end in enumerate(outcomes):
            held = self.team.held(rank)
            is_before, is_after = _same(held, before[rank]), _same(held, after[rank])
            is_error = isinstance(end, (sw.SparsewireError, NonFinite))
            if is_error and not is_before and not isinstance(end, sw.errors.CorruptMessageError):
                raise Violation(f"rank {rank} raised, and yet it has changed what it keeps")
            if not is_error and self.follows_twin and not is_after:
                raise Violation(f"rank {rank} took the step, and keeps other numbers")
        self._judge_blame(faults, [str(end) for end in outcomes])

    def _judge_blame(self, faults: Faults, texts: Sequence[str]) -> None:
        """The rank that caused an error is named in some rank's words."""
        text = "\n".join(texts)
        names = []
        if faults.corruption is not None and faults.corruption.group:
            names.append(f"rank {faults.corruption.sender}")
        if faults.crash is not None:
            names += [f"rank {faults.crash[0]}", "no room left"]
        local = self.scenario.topologies[0].local_world_size
        for rank in (faults.bad_rank, faults.late_rank):
            if rank is not None:
                names += [f"rank {rank}", f"node {rank // local}"]
        if not any(name in text for name in names):
            raise Violation(f"no error names {' or '.join(names)}")

    def _check_that_it_is_over(self, step: int) -> None:
        """A group that is broken refuses every later step."""
        self.team.begin(step)
        runs = [self.team.routine(rank) for rank in range(SIZE)]
        try:
            self.network.outcomes(runs, self.team.all_counters)
        except sw.errors.ExchangeError:
            return
        raise Violation("a broken group took another step")


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
