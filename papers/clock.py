"""The shares of time of a simulated step's parts, measured without making the step wait."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median

import torch

FIRST = 40  # the first representative step: graphs are captured by then, if at all
MANY = 64  # timed steps


class Clock:
    """Times the parts of some steps between marks, on a GPU by the GPU's own clock.

    Arguments:
        warmup: The number of steps at the beginning that are not representative.
    """

    def __init__(self, device: torch.device, warmup: int = 0) -> None:
        self._is_cuda, self._first = device.type == "cuda", warmup + FIRST
        self._steps: list[list[float | torch.cuda.Event]] = []
        self._is_on = False

    def begin(self, step: int) -> None:
        """Begin a step, counted from 0. Marks count only in steps that are timed."""
        self._is_on = self._first <= step < self._first + MANY
        if self._is_on:
            self._steps.append([])
            self.mark()

    def mark(self) -> None:
        """End one part of the step, and begin another."""
        if not self._is_on:
            return
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._steps[-1].append(event)
        else:
            self._steps[-1].append(time.perf_counter())

    def shares(self) -> list[float]:
        """Return the median share of each part in the timed steps. Waits for the device."""
        parts = [[_between(*pair) for pair in pairwise(marks)] for marks in self._steps]
        return [median(p[n] / sum(p) for p in parts) for n in range(len(parts[0]) if parts else 0)]


def _between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(begin.elapsed_time(end))
    assert not isinstance(end, torch.cuda.Event)
    return end - begin
