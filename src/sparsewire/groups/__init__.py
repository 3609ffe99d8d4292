"""Groups: the ranks that take part in an exchange, and the drivers that carry its requests.

`DistributedGroup` runs over a `torch.distributed` process group, `SimulatedGroup` runs any number
of ranks in one process. Both give the same numbers.
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
    """The protocol of groups: how a rank reaches the others.

    Attributes:
        rank: This rank's number.
        size: The number of ranks.
        doing: The operation under way, for error messages.
    """

    rank: int
    size: int
    doing: str

    def start(self, request: Request) -> Any:
        """Begin a request together with all other ranks, and return a ticket for `wait`."""

    def wait(self, ticket: Any) -> Any:
        """Wait until a request has ended, and return its answer."""

    def abandon(self, error: ExchangeError) -> None:
        """Refuse every later request, and tell the other ranks why."""


class Alone:
    """A group of one rank, which needs no process group.

    Nothing is sent, but selection and residual work as usual.

    Attributes:
        rank: 0.
        size: 1.
        doing: The operation under way, for error messages.

    >>> import torch
    >>> import sparsewire as sw
    >>> state = sw.functional.init("TopK(0.1)", {"w": torch.zeros(64, 64)})
    >>> gradients = {"w": torch.ones(64, 64)}
    >>> mean, state = sw.functional.exchange(gradients, state, sw.groups.Alone())
    """

    rank = 0
    size = 1
    doing = ""

    def start(self, request: Request) -> Any:
        """Return the answer to a request, as the ticket."""
        return answer_all([request])[0]

    def wait(self, ticket: Any) -> Any:
        """Return the answer to a request."""
        return ticket

    def abandon(self, error: ExchangeError) -> None:
        """Do nothing: there is no other rank to tell."""


Result = TypeVar("Result")


def drive(routine: Routine[Result], group: Group, counters: Counters) -> Result:
    """Run one rank's routine to its end, and return its result.

    A routine is a generator that yields requests and receives their answers. An error of the group
    is raised inside the routine, which may have to tell other ranks about it. If the routine raises
    an error that some ranks may not raise, the group is abandoned.

    Arguments:
        routine: The routine.
        group: The group that carries its requests.
        counters: Counts bytes and times.
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
        routine.close()  # free the buffers of the failed exchange at once
