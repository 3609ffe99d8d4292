"""Who talks, and the drivers that carry an exchange's requests.

`distributed` runs over a `torch.distributed` process group, `simulated` runs any number of workers
in one process. Both give the same numbers.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol, TypeVar

from ..collectives import Request
from ..meter import Meter
from .simulated import answer_all


class Group(Protocol):
    """A rank's way to the others."""

    rank: int
    size: int
    doing: str
    """What is under way, for the words of an error."""

    def answer(self, request: Request) -> Any:
        """Carry out one request together with all other ranks."""


class Alone:
    """A group of one: nothing has to be sent."""

    rank = 0
    size = 1
    doing = ""

    def answer(self, request: Request) -> Any:
        return answer_all([request])[0]


Result = TypeVar("Result")


def drive(run: Generator[Request, Any, Result], group: Group, meter: Meter) -> Result:
    """Run one rank's part to its end."""
    answer: Any = None
    while True:
        try:
            request = run.send(answer)
        except StopIteration as end:
            result: Result = end.value
            return result
        with meter.stage("exchange"):
            answer = group.answer(request)
        meter.count(request.traffic(group.size))
