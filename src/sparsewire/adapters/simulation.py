"""A simulation of many workers on one device that is fast enough for training.

Gradients and state are flat tensors, and the results equal those of `simulate`. The host does not
wait for the device between steps, and on CUDA the exchange of all workers is one captured graph.
It therefore uses `Exchange` and not `Session`, which waits for statuses at the end of every step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import kernels
from ..counters import Counters
from ..exchange import Call, Exchange, Finding, status_of
from ..groups.simulated import SimulatedGroup
from ..message import FINE, REASONS, VALUES
from ..randomness import RandomKey
from ..requests import Routine, all_gather
from ..scheme import AnyScheme, Scheme
from ..segments import Segments, Shape
from ..selectors import Coordination, Selector
from ..state import RESIDUAL, StepState
from ..workspace import Workspace
from .capture import Captured

# A captured graph repeats its random numbers: the offset of Threshold's sample and the rounding of
# QSGD. On CUDA, several exchanges with different numbers are therefore captured and take turns.
# Random coordinates are drawn outside the graph and never repeat. The number is even, since every
# step swaps the two copies of the state. If leaders rotate, it is a multiple of the workers.
TURNS = 4
_ALIGNED = 64  # values: the alignment of each worker's gradient


@dataclass(frozen=True)
class Flaw:
    """A problem at a step: NaN or infinity if `is_non_finite`, else a bug."""

    step: int
    what: str
    is_non_finite: bool

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}"


class Simulation:
    """The exchange of W workers that share one model.

    Fill `gradients`, one flat tensor for each worker in the order of `segments`. `exchange` writes
    the mean into the first of them. `sent` and `received` are the bytes of one worker and step, on
    average.
    """

    def __init__(
        self, scheme: AnyScheme, shapes: Mapping[str, Shape], workers: int, device: torch.device
    ) -> None:
        kernels.prepare(device.type)
        self.step = 0
        self._phases: list[_Phase] = []
        self.segments = scheme.at(0).partition(shapes)
        size = self.segments.size
        # rows of one tensor, so that a view can hold all workers' gradients of a parameter
        rows = torch.zeros(workers, size + -size % _ALIGNED, device=device)
        self.gradients = list(rows[:, :size])
        # the device of a tensor has an index, and tables are kept by device
        self._scheme, self._shapes, self._device = scheme, shapes, self.gradients[0].device
        full = scheme.at(2**62)
        widest = Exchange(full, full.partition(shapes), workers)
        kept = {field.key for field in scheme.fields}
        # Every step reads one copy of each worker's state and writes the other.
        self._pages = [
            [
                {
                    key: torch.zeros(cut.size + 1, dtype=widest.kept_as, device=device)
                    for key, cut in widest.fields(rank).items()
                }
                for rank in range(workers)
            ]
            for _ in range(2)
        ]
        self._kept = kept
        self._follows_lr = [field.key for field in scheme.fields if field.follows_lr]
        # the first problem: its step, the corruption code, the non-finite parameter
        self._found = torch.tensor([0, FINE, FINE], device=device)

    @property
    def sent(self) -> float:
        """The mean number of bytes that a worker sends in a step, over the steps so far."""
        return self._mean_of([phase.sent for phase in self._phases])

    @property
    def received(self) -> float:
        """The mean number of bytes that a worker receives in a step, over the steps so far."""
        return self._mean_of([phase.received for phase in self._phases])

    def _mean_of(self, measured: Sequence[float]) -> float:
        steps = [phase.steps if phase.sent else 0 for phase in self._phases]
        total = sum(number * each for number, each in zip(steps, measured, strict=True))
        return total / max(1, sum(steps))

    @property
    def flaw(self) -> Flaw | None:
        """The first problem, or None. Reading it waits for the device."""
        step, corruption, non_finite = self._found.tolist()
        if non_finite != FINE:
            return Flaw(step, f"NaN or infinity in {self.segments.params[non_finite].name}", True)
        if corruption != FINE:
            sender, reason = divmod(corruption, len(REASONS))
            is_non_finite = reason == VALUES
            return Flaw(step, f"the message of worker {sender}: {REASONS[reason]}", is_non_finite)
        return None

    @property
    def is_captured(self) -> bool:
        """Whether an exchange is one captured graph."""
        return bool(self._phases) and self._phases[-1].is_captured

    def residual(self, rank: int) -> Tensor:
        """Return a worker's residual; zeros without a memory."""
        size = self.segments.size
        kept = self._pages[self.step % 2][rank].get(RESIDUAL)
        if kept is None or RESIDUAL not in self._kept:
            return torch.zeros(size, device=self._device)
        return kept[:size]

    def scale(self, factor: float) -> None:
        """Multiply the residuals by old rate / new rate, after the learning rate changed."""
        for page in self._pages[self.step % 2]:
            for key in self._follows_lr:
                page[key].mul_(factor)

    def exchange(self) -> None:
        """Replace the first worker's gradient by the mean of all workers' messages."""
        scheme = self._scheme.at(self.step)
        if not self._phases or self._phases[-1].scheme != scheme:
            for phase in self._phases:
                phase.end()
            self._phases.append(_Phase(self, scheme))
        self._phases[-1].exchange()
        self.step += 1


class _Phase:
    """A simulation's exchanges while its scheme stays the same."""

    def __init__(self, simulation: Simulation, scheme: Scheme) -> None:
        self.scheme = scheme
        self.steps = 0
        self.sent = self.received = 0.0  # bytes per worker, measured in the second step
        self._simulation = simulation
        workers, device = len(simulation.gradients), simulation._device
        self._segments = scheme.partition(simulation._shapes)
        self._work = [Workspace() for _ in range(workers)]
        self._drawn: list[Tensor] = []
        if scheme.selector.coordination.is_seeded:
            ranks = 1 if scheme.selector.coordination.is_shared else workers
            self._drawn = [self._draw(rank) for rank in range(ranks)]
            scheme = replace(scheme, selector=_Drawn(scheme.selector, self._drawn))
        self._exchange = Exchange(scheme, self._segments, workers)
        self._group = SimulatedGroup(workers)
        turns = math.lcm(TURNS, workers) if scheme.selector.proposers != "none" else TURNS
        self._turns = [Captured(self._meet, device) for _ in range(turns)]

    @property
    def is_captured(self) -> bool:
        return all(turn.is_captured for turn in self._turns)

    def exchange(self) -> None:
        step = self._simulation.step
        for rank, indices in enumerate(self._drawn):
            indices.copy_(self._draw(rank))
        self.steps += 1
        if self.steps == 2:  # the first step also sends headers
            self._measure()
        else:
            self._turns[step % len(self._turns)]()

    def end(self) -> None:
        """Free the tensors and graphs of the exchanges, and keep the counts."""
        self._turns.clear()
        self._work.clear()
        self._drawn.clear()

    def _draw(self, rank: int) -> Tensor:
        whole, work = self._simulation, self._work[rank]
        draw = RandomKey(self.scheme.seed, whole.step, rank)
        return self.scheme.selector.coordinates(self._segments, draw, whole._device, work)

    def _meet(self) -> None:
        """Exchange, and record problems on the device."""
        all_counters = [Counters() for _ in self._work]
        runs = self._runs(all_counters)
        memory = self.scheme.memory
        if memory.kept_as(torch.float32) == torch.float32 and memory.decay == 1:
            found = self._group.follow(runs, all_counters)
            # the other routines end before they report their own non-finite gradients
            own = [
                counters.non_finite for counters in all_counters if counters.non_finite is not None
            ]
            worst = torch.stack([found.non_finite, *own]).amax()
            self._note([replace(found, non_finite=worst)])
        else:  # memories round and decay at the end of a routine, so all must finish
            self._note(self._group.drive(runs, all_counters))

    def _runs(self, all_counters: Sequence[Counters]) -> list[Routine[Finding]]:
        whole = self._simulation
        step = whole.step % len(self._turns) if whole._device.type == "cuda" else whole.step
        before, after = whole._pages[step % 2], whole._pages[1 - step % 2]
        runs = []
        for rank, work in enumerate(self._work):
            keys = self._exchange.fields(rank)
            kept = {key: before[rank][key] for key in keys if key in whole._kept}
            state = StepState(kept, {key: after[rank][key] for key in keys})
            call, gradient = Call(step, rank), whole.gradients[rank]
            runs.append(self._exchange.run(gradient, state, call, all_counters[rank], work))
        return runs

    def _note(self, findings: Sequence[Finding]) -> None:
        first = self._simulation._found
        for found in findings:
            news = torch.stack([found.corruption, found.non_finite])
            first[1:] = torch.where((first[1:] == FINE).all(), news, first[1:])
        first[0] += (first[1:] == FINE).all()

    def _measure(self) -> None:
        """Exchange as real workers do, with statuses, and record the bytes."""
        all_counters = [Counters() for _ in self._work]
        findings = self._group.drive(self._runs(all_counters), all_counters)
        self._note(findings)
        self._group.drive(
            [_agree(found, rank) for rank, found in enumerate(findings)], all_counters
        )
        workers = len(all_counters)
        self.sent = sum(counters.bytes_sent for counters in all_counters) / workers
        self.received = sum(counters.bytes_received for counters in all_counters) / workers


def _agree(found: Finding, rank: int) -> Routine[None]:
    """Send the status that a session sends at the end of a step, to count its bytes."""
    yield all_gather(status_of([found], rank), group="status")


@dataclass(frozen=True, repr=False, eq=False)
class _Drawn(Selector):
    """A wrapper for a seeded selector whose coordinates were drawn into fixed tensors."""

    selector: Selector
    drawn: Sequence[Tensor]  # one tensor for all ranks if they share it, else one per rank

    @property
    def coordination(self) -> Coordination:  # type: ignore[override]
        return self.selector.coordination

    @property
    def clustered(self) -> bool:  # type: ignore[override]
        return self.selector.clustered

    def __repr__(self) -> str:
        return repr(self.selector)

    @property
    def identity(self) -> str:
        return self.selector.identity

    def entries(self, length: int) -> int:
        return self.selector.entries(length)

    def capacity(self, length: int) -> int:
        return self.selector.capacity(length)

    def coordinates(
        self, segments: Segments, key: RandomKey, device: torch.device, work: Workspace
    ) -> Tensor:
        return self.drawn[0 if self.coordination.is_shared else key.rank]

    def contraction(self, length: int) -> float:
        return self.selector.contraction(length)
