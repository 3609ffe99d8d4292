"""One rank's steps with one contender, each split into its parts.

Backward ends when the last gradient is there. What the exchange did until then is hidden behind
it; what it does afterwards is what a step waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import torch

from sparsewire.counters import STAGES

from ...tasks.workloads import Workload
from ..contenders import Entry

PARTS = ("forward", "backward", *STAGES, "wait", "optimizer")
"""The parts of a step's time; of each stage, only the part that backward does not hide. `wait` is
the time until `backward()` returns in which no stage runs."""

Stage = tuple[str, float, float]  # its name, from, to
# When two stages are at work at the same time, a step that had one of them less would gain least
# from the exchange, which goes on by itself.
_URGENCY = ("select", "encode", "decode", "exchange")


@dataclass(frozen=True)
class Step:
    """One step: seconds of each of `PARTS`, and for each stage its total and hidden time."""

    parts: dict[str, float]
    busy: dict[str, float]
    hidden: dict[str, float]

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Marks:
    """When one step reached which point."""

    began: float
    forwarded: float
    last_gradient: float
    returned: float  # from backward
    ended: float


def steps(
    entry: Entry, workload: Workload, optimizer: torch.optim.Optimizer, meet: Callable[[], None]
) -> Generator[Step, None, None]:
    """Take steps without end; `meet` is a barrier before each of them."""
    arrivals: list[float] = []  # of gradients
    hooks = [
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _: arrivals.append(perf_counter())
        )
        for parameter in workload.model.parameters()
        if parameter.requires_grad
    ]
    counters = entry.wire.counters if entry.wire else None
    try:
        while True:
            meet()
            arrivals.clear()
            entry.starts.clear()
            if counters is not None:
                counters.trace = []
            began = perf_counter()
            optimizer.zero_grad()
            loss = workload.loss(entry.model)
            forwarded = perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            returned = perf_counter()
            optimizer.step()
            marks = Marks(began, forwarded, max(arrivals), returned, perf_counter())
            stages = list(counters.trace or ()) if counters is not None else []
            if entry.starts:  # a peer says only when it began
                stages = [("exchange", entry.starts[0], returned)]
            yield split(marks, stages)
    finally:
        for hook in hooks:
            hook.remove()
        if counters is not None:
            counters.trace = None


def split(marks: Marks, stages: Sequence[Stage]) -> Step:
    """A step's parts from when it reached which point and when its stages were at work."""
    busy = dict.fromkeys(STAGES, 0.0)
    hidden = dict.fromkeys(STAGES, 0.0)
    for stage, start, stop in stages:
        busy[stage] += stop - start
        hidden[stage] += max(0.0, min(stop, marks.last_gradient) - start)
    shown = dict.fromkeys((*STAGES, "wait"), 0.0)
    for stage, seconds in _after(marks.last_gradient, marks.returned, stages):
        shown[stage] += seconds
    stepping = marks.ended - marks.returned
    for stage, seconds in _after(marks.returned, marks.ended, stages):
        if stage != "wait":  # an exchange of updates, which goes on in the optimizer's step
            shown[stage] += seconds
            stepping -= seconds
    parts = {
        "forward": marks.forwarded - marks.began,
        "backward": marks.last_gradient - marks.forwarded,
        **shown,
        "optimizer": stepping,
    }
    return Step(parts, busy, hidden)


def _after(begin: float, end: float, stages: Sequence[Stage]) -> Iterator[tuple[str, float]]:
    """Yield what a step waits for between two points in time, and for how long."""
    times = {time for _, start, stop in stages for time in (start, stop) if begin < time < end}
    for start, stop in pairwise(sorted({begin, end} | times)):
        at_work = {name for name, since, until in stages if since <= start and stop <= until}
        yield next((name for name in _URGENCY if name in at_work), "wait"), stop - start
