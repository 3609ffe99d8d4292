"""Ranks as threads, for what holds a group of its own: `DistributedOptimizer` without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from sparsewire.groups.simulated import answer_all
from sparsewire.requests import Request

from ..patience import patience

Result = TypeVar("Result")


@dataclass
class _Table:
    """Where requests are laid down and answers picked up."""

    size: int
    requests: dict[int, Request] = field(default_factory=dict)
    answers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        limit = patience(20)  # a rank that does not come fails the test
        self.laid = threading.Barrier(self.size, self._answer, limit)
        self.selection = threading.Barrier(self.size, timeout=limit)

    def _answer(self) -> None:
        self.answers = answer_all([self.requests[rank] for rank in range(self.size)])


@dataclass
class Seat:
    """One rank's group."""

    rank: int
    size: int
    table: _Table
    doing: str = ""

    def start(self, request: Request) -> Any:
        # a copy, as on a network: the payload may be written to before all have read the answer
        self.table.requests[self.rank] = replace(request, payload=request.payload.clone())
        self.table.laid.wait()
        answer = self.table.answers[self.rank]
        self.table.selection.wait()
        return answer

    def wait(self, ticket: Any) -> Any:
        return ticket


def together(size: int, work: Callable[[Seat], Result]) -> list[Result]:
    """Run `work` on `size` ranks at once; their results in rank order."""
    table = _Table(size)

    def one(rank: int) -> Result:
        try:
            return work(Seat(rank, size, table))
        except BaseException:
            table.laid.abort()  # the others need not wait
            table.selection.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
