"""Counters: the bytes of exchanges, and their time by stage.

Stages also show up as `sparsewire::select`, `::encode`, `::exchange` and `::decode` in a profile.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from .segments import ParamSlice

Result = TypeVar("Result")
STAGES = ("select", "encode", "exchange", "decode")


@dataclass(frozen=True)
class Counts:
    """The counts up to some moment, or between two moments."""

    bytes_sent: int = 0
    bytes_received: int = 0
    values: int = 0
    aimed_at: int = 0
    selected: int | Tensor = 0
    seconds: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def since(self, before: Counts) -> Counts:
        """Return the difference to an earlier moment."""
        return Counts(
            self.bytes_sent - before.bytes_sent,
            self.bytes_received - before.bytes_received,
            self.values - before.values,
            self.aimed_at - before.aimed_at,
            self.selected - before.selected,
            {stage: self.seconds[stage] - before.seconds[stage] for stage in STAGES},
        )


@dataclass
class Counters:
    """Running totals of one rank, and the counts of its last step."""

    steps: int = 0
    skipped: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    values: int = 0  # gradient values so far, for the comparison with dense
    aimed_at: int = 0  # coordinates that selectors were asked for
    selected: int | Tensor = 0  # coordinates that they chose; on a GPU a tensor, read on demand
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    accumulated: dict[tuple[ParamSlice, ...], Tensor] = field(
        default_factory=dict
    )  # squares, last step
    non_finite: Tensor | None = (
        None  # the first parameter with NaN or infinity in the last exchange
    )
    trace: list[tuple[str, float, float]] | None = None  # stage, from, to; kept if somebody asks
    last_step: Counts = field(default_factory=Counts)
    _begin: Counts = field(default_factory=Counts)

    @property
    def counts(self) -> Counts:
        """The current totals."""
        return Counts(
            self.bytes_sent,
            self.bytes_received,
            self.values,
            self.aimed_at,
            self.selected,
            dict(self.seconds),
        )

    def begin_step(self) -> None:
        """Begin to count a step by itself."""
        self._begin = self.counts

    def end_step(self) -> None:
        """End the step, and store its counts in `last_step`."""
        self.last_step = self.counts.since(self._begin)

    @property
    def gradient_squares(self) -> dict[str, float]:
        """The sum of squares of the last step's gradient, by parameter."""
        return {
            param.name: square
            for params, squares in self.accumulated.items()
            for param, square in zip(params, squares.tolist(), strict=True)
        }

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a stage."""
        start = time.perf_counter()
        with torch.profiler.record_function(f"sparsewire::{name}"):
            yield
        stop = time.perf_counter()
        self.seconds[name] += stop - start
        if self.trace is not None:
            self.trace.append((name, start, stop))

    def timed(self, stage: str, work: Generator[Any, Any, Result]) -> Generator[Any, Any, Result]:
        """Add the time of `work` to a stage, without the time in which it waits for answers."""
        answer: Any = None
        while True:
            with self.stage(stage):
                try:
                    request = work.send(answer)
                except StopIteration as end:
                    result: Result = end.value
                    return result
            answer = yield request

    def count(self, nbytes: int) -> None:
        """Count bytes that were sent, and the same number received."""
        self.bytes_sent += nbytes
        self.bytes_received += nbytes
