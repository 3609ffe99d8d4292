"""What an exchange cost: bytes, and time by stage.

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
    """What was counted, up to some moment or between two of them."""

    bytes_sent: int = 0
    bytes_received: int = 0
    values: int = 0
    aimed_at: int = 0
    selected: int | Tensor = 0
    seconds: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def since(self, before: Counts) -> Counts:
        """The difference to an earlier moment."""
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
    values: int = 0  # gradient values that passed, for the comparison with dense
    aimed_at: int = 0  # coordinates that selectors were to choose
    selected: int | Tensor = 0  # and those they chose; on a GPU not known until asked for
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
        """The totals of this moment."""
        return Counts(
            self.bytes_sent,
            self.bytes_received,
            self.values,
            self.aimed_at,
            self.selected,
            dict(self.seconds),
        )

    def begin_step(self) -> None:
        """A step begins: count it by itself as well."""
        self._begin = self.counts

    def end_step(self) -> None:
        """The step is over, and `last_step` is what it took."""
        self.last_step = self.counts.since(self._begin)

    @property
    def gradient_squares(self) -> dict[str, float]:
        """By parameter, the sum of squares of what the last step put into the memory."""
        return {
            param.name: square
            for params, squares in self.accumulated.items()
            for param, square in zip(params, squares.tolist(), strict=True)
        }

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time spent inside towards a stage."""
        start = time.perf_counter()
        with torch.profiler.record_function(f"sparsewire::{name}"):
            yield
        stop = time.perf_counter()
        self.seconds[name] += stop - start
        if self.trace is not None:
            self.trace.append((name, start, stop))

    def timed(self, stage: str, work: Generator[Any, Any, Result]) -> Generator[Any, Any, Result]:
        """Count the time that `work` takes towards a stage, without what it waits for answers."""
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
        """Count what a collective sent, and received as much."""
        self.bytes_sent += nbytes
        self.bytes_received += nbytes
