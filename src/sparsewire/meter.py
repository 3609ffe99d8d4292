"""What an exchange cost: bytes, and time by stage.

Stages also show up as `sparsewire::select`, `::encode`, `::exchange` and `::decode` in a profile.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from .segments import Span

Result = TypeVar("Result")
STAGES = ("select", "encode", "exchange", "decode")


@dataclass
class Meter:
    """Running totals of one rank."""

    steps: int = 0
    skipped: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    values: int = 0  # gradient values that passed, for the comparison with dense
    aimed_at: int = 0  # coordinates that selectors were to choose
    selected: int | Tensor = 0  # and those they chose; on a GPU not known until asked for
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    deposited: dict[tuple[Span, ...], Tensor] = field(default_factory=dict)  # squares, last step
    unsound: Tensor | None = None  # the first span with NaN or infinity in the last exchange
    trace: list[tuple[str, float, float]] | None = None  # stage, from, to; kept if somebody asks

    @property
    def gradient_squares(self) -> dict[str, float]:
        """By parameter, the sum of squares of what the last step put into the memory."""
        return {
            span.name: square
            for spans, squares in self.deposited.items()
            for span, square in zip(spans, squares.tolist(), strict=True)
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
