"""Who talks, and the drivers that carry an exchange's requests.

`distributed` runs over a `torch.distributed` process group, `simulated` runs any number of workers
in one process. Both give the same numbers.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..collectives import Request
from ..engine import Outcome, Run
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


def drive(run: Run, group: Group, meter: Meter) -> Outcome:
    """Run one rank's exchange to its end."""
    answer: Any = None
    while True:
        try:
            request = run.send(answer)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
        with meter.stage("exchange"):
            answer = group.answer(request)
        meter.count(request.traffic(group.size))
