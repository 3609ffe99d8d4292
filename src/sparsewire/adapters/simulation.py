"""W workers on one device, fast enough to train with: gradients and memories in flat tensors.

The numbers are those of `simulate`. Nothing waits for the device between steps, and on CUDA the
exchange of all workers is one launch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import kernels
from ..desk import Call
from ..engine import Exchange, Finding, agree
from ..groups.simulated import SimulatedGroup
from ..kernels.cards import owned
from ..memory import LEDGER
from ..message import FINE, REASONS, VALUES
from ..meter import Meter
from ..requests import Routine
from ..scheme import AnyScheme, Scheme
from ..segments import Segments, Shape
from ..selectors import Coordination, Draw, Selector
from ..shards import OWNED
from ..workspace import Workspace
from .capture import Captured

# What is captured repeats the random numbers that are drawn inside it: where Threshold's sample
# begins, and how QSGD rounds. So on CUDA several exchanges are captured, with numbers of their own,
# and take turns. Coordinates chosen at random are drawn outside and never repeat.
# Even, since every exchange also has its own page of the memory to read. Where ranks lead in turn,
# all of them do.
TURNS = 4
_ALIGNED = 64  # values: where a worker's gradient begins


@dataclass(frozen=True)
class Flaw:
    """Something wrong at a step; `is_unsound` if numbers were not finite, else it is a bug."""

    step: int
    what: str
    is_unsound: bool

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}"


class Simulation:
    """The exchange of W workers that share one model.

    Fill `gradients`, one flat tensor a worker, cut as `segments` says; `exchange` leaves the mean
    in the first of them. `sent` and `received` are the bytes of one worker in one step, on average.
    """

    def __init__(
        self, scheme: AnyScheme, shapes: Mapping[str, Shape], workers: int, device: torch.device
    ) -> None:
        kernels.prepare(device.type)
        self.step = 0
        self.sent = self.received = 0.0
        self.segments = scheme.at(0).cut(shapes)
        size = self.segments.size
        # side by side, so that one tensor can hold all workers' gradients of a parameter
        rows = torch.zeros(workers, size + -size % _ALIGNED, device=device)
        self.gradients = list(rows[:, :size])
        # with its number, as tensors tell it: tables are kept by device
        self._scheme, self._shapes, self._device = scheme, shapes, self.gradients[0].device
        kept = scheme.memory.kept_as(torch.float32)
        names = {*scheme.memory.fields, LEDGER}
        # Every step reads one page of each worker and writes the other.
        self._pages = [
            [
                {name: torch.zeros(size + 1, dtype=kept, device=device) for name in names}
                for _ in range(workers)
            ]
            for _ in range(2)
        ]
        for pages in self._pages if scheme.at(2**62).collective.fields else []:
            for rank, page in enumerate(pages):
                owns = sum(owned(n, math.prod(s), rank, workers) for n, s in shapes.items())
                page[OWNED] = torch.zeros(owns + 1, dtype=kept, device=device)
        # the first finding that was not fine: at which step, damage, bad span
        self._found = torch.tensor([0, FINE, FINE], device=device)
        self._phase: _Phase | None = None

    @property
    def flaw(self) -> Flaw | None:
        """What was first found wrong; asking waits for the device."""
        step, damage, unsound = self._found.tolist()
        if unsound != FINE:
            return Flaw(step, f"NaN or infinity in {self.segments.spans[unsound].name}", True)
        if damage != FINE:
            sender, reason = divmod(damage, len(REASONS))
            is_unsound = reason == VALUES
            return Flaw(step, f"the message of worker {sender}: {REASONS[reason]}", is_unsound)
        return None

    @property
    def is_captured(self) -> bool:
        """Whether an exchange is one launch by now."""
        return self._phase is not None and self._phase.is_captured

    def scale(self, factor: float) -> None:
        """Multiply what is kept back, for another learning rate: by the old over the new."""
        for fields in self._pages[self.step % 2]:
            for name in (LEDGER, OWNED):
                if name in fields:
                    fields[name].mul_(factor)

    def exchange(self) -> None:
        """Replace the first worker's gradient by the mean of what they all send."""
        scheme = self._scheme.at(self.step)
        if self._phase is None or self._phase.scheme != scheme:
            self._phase = _Phase(self, scheme)
        self._phase.exchange()
        self.step += 1


class _Phase:
    """A simulation's exchanges while its scheme stays the same."""

    def __init__(self, simulation: Simulation, scheme: Scheme) -> None:
        self.scheme = scheme
        self._simulation, self._first = simulation, simulation.step
        workers, device = len(simulation.gradients), simulation._device
        segments = [scheme.cut(simulation._shapes) for _ in range(workers)]
        self._drawn: list[Tensor] = []
        if scheme.selector.coordination.is_seeded:
            ranks = 1 if scheme.selector.coordination.is_shared else workers
            self._drawn = [self._draw(segments[0], rank) for rank in range(ranks)]
            scheme = replace(scheme, selector=_Drawn(scheme.selector, self._drawn))
        self._exchanges = [Exchange(scheme, cut) for cut in segments]
        self._group = SimulatedGroup(workers)
        self._work = [Workspace() for _ in range(workers)]
        turns = math.lcm(TURNS, workers) if scheme.selector.proposers != "none" else TURNS
        self._turns = [Captured(self._meet, device) for _ in range(turns)]

    @property
    def is_captured(self) -> bool:
        return all(turn.is_captured for turn in self._turns)

    def exchange(self) -> None:
        step = self._simulation.step
        for rank, indices in enumerate(self._drawn):
            indices.copy_(self._draw(self._exchanges[0].segments, rank))
        if step == self._first + 1:  # not the first: that one has the headers in it
            self._measure()
        else:
            self._turns[step % len(self._turns)]()

    def _draw(self, segments: Segments, rank: int) -> Tensor:
        draw = Draw(self.scheme.seed, self._simulation.step, rank)
        return self.scheme.selector.coordinates(segments, draw, self._simulation._device)

    def _meet(self) -> None:
        """Exchange; what was found wrong is noted on the device."""
        meters = [Meter() for _ in self._exchanges]
        runs = self._runs(meters)
        if self.scheme.memory.kept_as(torch.float32) == torch.float32:
            found = self._group.follow(runs, meters)
            # the others end before they would tell what they found in their own gradients
            own = [meter.unsound for meter in meters if meter.unsound is not None]
            worst = torch.stack([found.unsound, *own]).amax()
            self._note([replace(found, unsound=worst)])
        else:  # memories are rounded when all is over
            self._note(self._group.drive(runs, meters))

    def _runs(self, meters: Sequence[Meter]) -> list[Routine[Finding]]:
        whole = self._simulation
        step = whole.step % len(self._turns) if whole._device.type == "cuda" else whole.step
        before, after = whole._pages[step % 2], whole._pages[1 - step % 2]
        runs = []
        for rank, exchange in enumerate(self._exchanges):
            kept = {name: before[rank][name] for name in self.scheme.fields}
            call = Call(step, rank, len(self._exchanges))
            gradient = whole.gradients[rank]
            runs.append(
                exchange.run(gradient, kept, after[rank], call, meters[rank], self._work[rank])
            )
        return runs

    def _note(self, findings: Sequence[Finding]) -> None:
        first = self._simulation._found
        for found in findings:
            news = torch.stack([found.damage, found.unsound])
            first[1:] = torch.where((first[1:] == FINE).all(), news, first[1:])
        first[0] += (first[1:] == FINE).all()

    def _measure(self) -> None:
        """Exchange as real workers do, verdicts included, and note the bytes."""
        meters = [Meter() for _ in self._exchanges]
        findings = self._group.drive(self._runs(meters), meters)
        self._note(findings)
        self._group.drive([agree([found], rank) for rank, found in enumerate(findings)], meters)
        self._simulation.sent = sum(meter.bytes_sent for meter in meters) / len(meters)
        self._simulation.received = sum(meter.bytes_received for meter in meters) / len(meters)


@dataclass(frozen=True, repr=False, eq=False)
class _Drawn(Selector):
    """Another selector's choice, drawn ahead into tensors that stay where they are."""

    selector: Selector
    drawn: Sequence[Tensor]  # one for all ranks if they share it, else one for each

    @property
    def coordination(self) -> Coordination:  # type: ignore[override]
        return self.selector.coordination

    @property
    def clustered(self) -> bool:  # type: ignore[override]
        return self.selector.clustered

    def __repr__(self) -> str:
        return repr(self.selector)

    def entries(self, length: int) -> int:
        return self.selector.entries(length)

    def room(self, length: int) -> int:
        return self.selector.room(length)

    def coordinates(self, segments: Segments, draw: Draw, device: torch.device) -> Tensor:
        return self.drawn[0 if self.coordination.is_shared else draw.rank]

    def contraction(self, length: int) -> float:
        return self.selector.contraction(length)
