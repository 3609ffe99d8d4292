"""One rank's steps with one contender, each split into its parts.

Backward ends when the last gradient is there. What the exchange did until then is hidden behind
it; what it does afterwards is what a step waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn

from ..meter import STAGES
from ..tasks.workloads import Workload
from .contenders import Entry

PARTS = ("forward", "backward", *STAGES, "wait", "optimizer")
"""What a step's time adds up to; of the stages, only what backward does not hide. `wait`: what
passes until `backward()` returns while no stage is at work."""


@dataclass(frozen=True)
class Step:
    """One step: seconds of each of `PARTS`, and of each stage all it took, hidden or not."""

    parts: dict[str, float]
    busy: dict[str, float]

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.parts.values())


def run(
    entry: Entry,
    workload: Workload,
    optimizer: torch.optim.Optimizer,
    steps: int,
    meet: Callable[[], None],
) -> list[Step]:
    """Take `steps` steps; `meet` waits for all ranks, who begin each of them together."""
    arrivals: list[float] = []  # of gradients
    hooks = [
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _: arrivals.append(perf_counter())
        )
        for parameter in workload.model.parameters()
        if parameter.requires_grad
    ]
    meter = entry.wire.meter if entry.wire else None
    taken = []
    try:
        for _ in range(steps):
            meet()
            arrivals.clear()
            entry.starts.clear()
            if meter is not None:
                meter.trace = []
            began = perf_counter()
            optimizer.zero_grad()
            loss = workload.loss(entry.model)
            forwarded = perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            returned = perf_counter()
            optimizer.step()
            ended = perf_counter()
            last = max(arrivals)
            stages = meter.trace if meter is not None and meter.trace else []
            if entry.starts:  # a peer says only when it began
                stages = [("exchange", entry.starts[0], returned)]
            taken.append(_split((began, forwarded, last, returned, ended), stages))
    finally:
        for hook in hooks:
            hook.remove()
        if meter is not None:
            meter.trace = None
    return taken


def _split(
    marks: tuple[float, float, float, float, float], stages: Sequence[tuple[str, float, float]]
) -> Step:
    began, forwarded, last, returned, ended = marks
    busy = dict.fromkeys(STAGES, 0.0)
    shown = dict.fromkeys(STAGES, 0.0)
    for stage, start, stop in stages:
        busy[stage] += stop - start
        shown[stage] += max(0.0, stop - max(start, last))
    parts = {
        "forward": forwarded - began,
        "backward": last - forwarded,
        **shown,
        "wait": returned - last - sum(shown.values()),
        "optimizer": ended - returned,
    }
    return Step(parts, busy)


def parameters_of(model: nn.Module) -> int:
    """How many values a gradient has."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
