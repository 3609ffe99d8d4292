"""Who talks, and the drivers that carry an exchange's requests.

`distributed` runs over a `torch.distributed` process group, `simulated` runs any number of workers
in one process. Both give the same numbers.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from ..counters import Counters
from ..errors import ExchangeError, SparsewireError
from ..requests import Request, Routine, Start, Wait
from .distributed import DistributedGroup
from .simulated import SimulatedGroup, answer_all

__all__ = ["Alone", "DistributedGroup", "Group", "SimulatedGroup", "drive"]


class Group(Protocol):
    """A rank's way to the others."""

    rank: int
    size: int
    doing: str
    """What is under way, for the words of an error."""

    def start(self, request: Request) -> Any:
        """Begin a request together with all other ranks; returns a ticket for `wait`."""

    def wait(self, ticket: Any) -> Any:
        """Wait for the end of a request, and return its answer."""

    def abandon(self, error: ExchangeError) -> None:
        """Refuse every later request, and tell the other ranks why."""


class Alone:
    """A group of one: nothing has to be sent."""

    rank = 0
    size = 1
    doing = ""

    def start(self, request: Request) -> Any:
        return answer_all([request])[0]

    def wait(self, ticket: Any) -> Any:
        return ticket

    def abandon(self, error: ExchangeError) -> None:
        pass


Result = TypeVar("Result")


def drive(routine: Routine[Result], group: Group, counters: Counters) -> Result:
    """Run one rank's routine to its end.

    An error of the group is raised inside the routine, which may have others to tell about it. If
    the routine raises an error that not all ranks are sure to raise, the group is abandoned.
    """
    answer: Any = None
    error: SparsewireError | None = None
    try:
        while True:
            try:
                step = routine.send(answer) if error is None else routine.throw(error)
            except StopIteration as end:
                result: Result = end.value
                return result
            answer = error = None
            try:
                with counters.stage("exchange"):
                    if isinstance(step, Wait):
                        answer = group.wait(step.ticket)
                    elif isinstance(step, Start):
                        answer = group.start(step.request)
                    else:
                        answer = group.wait(group.start(step))
            except SparsewireError as failed:
                error = failed
                continue
            if not isinstance(step, Wait):
                request = step.request if isinstance(step, Start) else step
                if request.is_counted:
                    counters.count(request.traffic(group.size))
    except ExchangeError as error_of_routine:
        if not error_of_routine.is_agreed:
            group.abandon(error_of_routine)
        raise
    finally:
        routine.close()  # what failed lets go of its buffers at once
