"""What a simulated step's time goes into, measured without making it wait."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median

import torch

FIRST = 40  # the step from which on they are alike: captured, if they ever are
MANY = 64  # steps timed


class Clock:
    """Times some steps, each from mark to mark; on a GPU by the GPU's own clock.

    Arguments:
        warmup: steps at the beginning that are of another kind.
    """

    def __init__(self, device: torch.device, warmup: int = 0) -> None:
        self._is_cuda, self._first = device.type == "cuda", warmup + FIRST
        self._steps: list[list[float | torch.cuda.Event]] = []
        self._is_on = False

    def begin(self, step: int) -> None:
        """A step begins, counted from 0; marks count only in those that are timed."""
        self._is_on = self._first <= step < self._first + MANY
        if self._is_on:
            self._steps.append([])
            self.mark()

    def mark(self) -> None:
        """A part of the step ends here, and another begins."""
        if not self._is_on:
            return
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._steps[-1].append(event)
        else:
            self._steps[-1].append(time.perf_counter())

    def shares(self) -> list[float]:
        """Every part's share of a step, the median of all that were timed; waits for the device."""
        parts = [[_between(*pair) for pair in pairwise(marks)] for marks in self._steps]
        return [median(p[n] / sum(p) for p in parts) for n in range(len(parts[0]) if parts else 0)]


def _between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(begin.elapsed_time(end))
    assert not isinstance(end, torch.cuda.Event)
    return end - begin
