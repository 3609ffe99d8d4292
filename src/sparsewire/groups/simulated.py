"""Any number of ranks in one process, without threads or sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from ..counters import Counters
from ..errors import DisagreementError, ExchangeError, SchemeError, SparsewireError
from ..requests import GroupName, Request, Routine, Start, Step, Wait

Result = TypeVar("Result")


class SimulatedGroup:
    """Runs the routines of several ranks in one process, each until it has to wait for another.

    `functional.simulate` uses it. Use it yourself to test what happens between ranks: override
    `carry` in a subclass to see or change messages, and `pick` to decide which rank goes on next.

    Arguments:
        size: The number of ranks.
        groups: For each group that requests may name, which ranks belong together, such as
            `intra_node=[[0, 1], [2, 3]]`. In a group that is not given, all ranks belong together.

    Attributes:
        size: The number of ranks.
        broken: The error that broke the group, or None. As with real ranks, an error that not all
            ranks raise breaks it.

    >>> import sparsewire as sw
    >>> sw.groups.SimulatedGroup(8).size
    8
    """

    def __init__(self, size: int, **groups: Sequence[Sequence[int]]) -> None:
        if size < 1:
            raise SchemeError(f"a simulated group has at least 1 rank, not {size}")
        self.size = size
        self.broken: ExchangeError | None = None
        self._groups = groups

    def drive(
        self, runs: Sequence[Routine[Result]], all_counters: Sequence[Counters]
    ) -> list[Result]:
        """Run every rank's routine to its end, and return the results.

        Arguments:
            runs: One routine for each rank.
            all_counters: Counters for each rank.
        """
        turns = _Turns(self, runs, all_counters)
        while turns.alive:
            turns.take()
        return [turns.results[rank] for rank in range(self.size)]

    def follow(self, runs: Sequence[Routine[Result]], all_counters: Sequence[Counters]) -> Result:
        """Run the first rank's routine to its end, and the others as far as it depends on them.

        All ranks end with the same mean, so only one of them needs to compute it.

        Arguments:
            runs: One routine for each rank.
            all_counters: Counters for each rank.
        """
        turns = _Turns(self, runs, all_counters)
        while 0 not in turns.results:
            turns.take()
        for run in runs[1:]:
            run.close()
        return turns.results[0]

    def outcomes(
        self, runs: Sequence[Routine[Result]], all_counters: Sequence[Counters]
    ) -> list[Result | SparsewireError]:
        """Run every rank to its end or to its error, and return the results and errors.

        A rank that waits for one that has ended gets an `ExchangeError`, as from a network.

        Arguments:
            runs: One routine for each rank.
            all_counters: Counters for each rank.
        """
        turns = _Turns(self, runs, all_counters, raises=False)
        while turns.alive:
            turns.take()
        return [turns.results.get(rank, turns.errors.get(rank)) for rank in range(self.size)]  # type: ignore[misc]

    def pick(self, ready: Sequence[int]) -> int:
        """Return which rank goes on next, out of those that need not wait."""
        return ready[0]

    def carry(self, ranks: Sequence[int], requests: Sequence[Request]) -> list[Any]:
        """Return the answer that each of these ranks gets, once all of them have made a request."""
        return answer_all(requests)

    def members(self, rank: int, group: GroupName) -> tuple[int, ...]:
        """Return the ranks that take part in a rank's requests to a group.

        Arguments:
            rank: The rank that makes the request.
            group: The name of the group.
        """
        sets = self._groups.get(group, [range(self.size)])
        found = next((tuple(ranks) for ranks in sets if rank in ranks), None)
        if found is None:
            raise DisagreementError(f"rank {rank} belongs to no group {group!r}")
        return found


@dataclass
class _Ticket:
    """A request that is under way."""

    rank: int
    request: Request
    answer: Any = None
    is_done: bool = False


class _Turns(Generic[Result]):
    """The ranks that still run, what they wait for, and how the others ended."""

    def __init__(
        self,
        group: SimulatedGroup,
        runs: Sequence[Routine[Result]],
        all_counters: Sequence[Counters],
        raises: bool = True,
    ) -> None:
        if group.broken is not None:
            raise ExchangeError(f"this group is broken: {group.broken}")
        self.alive: dict[int, Generator[Step, Any, Result]] = dict(
            zip(range(group.size), runs, strict=True)
        )
        self.results: dict[int, Result] = {}
        self.errors: dict[int, SparsewireError] = {}
        self._group = group
        self._meters = all_counters
        self._raises = raises
        self._waiting: dict[int, _Ticket] = {}
        self._queues: dict[tuple[GroupName, tuple[int, ...]], dict[int, deque[_Ticket]]] = {}

    def take(self) -> None:
        """Let a rank that need not wait continue until it must."""
        waiting = self._waiting
        ready = [r for r in self.alive if r not in waiting or waiting[r].is_done]
        if not ready:
            self._give_up()
            return
        rank = self._group.pick(ready)
        ticket = waiting.pop(rank, None)
        self._advance(rank, None if ticket is None else ticket.answer)

    def _advance(self, rank: int, answer: Any, error: SparsewireError | None = None) -> None:
        run = self.alive[rank]
        try:
            step = run.send(answer) if error is None else run.throw(error)
            while isinstance(step, Start):
                request = replace(step.request, payload=step.request.payload.clone())
                step = run.send(self._post(rank, request))
            self._waiting[rank] = step.ticket if isinstance(step, Wait) else self._post(rank, step)
        except StopIteration as end:
            self.results[rank] = end.value
            del self.alive[rank]
        except SparsewireError as raised:
            if isinstance(raised, ExchangeError) and not raised.is_agreed:
                self._group.broken = self._group.broken or raised
            if self._raises:
                raise
            self.errors[rank] = raised
            del self.alive[rank]

    def _post(self, rank: int, request: Request) -> _Ticket:
        """Make a request, and answer it if all other ranks have made theirs."""
        ranks = self._group.members(rank, request.group)
        if request.is_counted:
            self._meters[rank].count(request.traffic(len(ranks)))
        queues = self._queues.setdefault((request.group, ranks), {rank: deque() for rank in ranks})
        ticket = _Ticket(rank, request)
        queues[rank].append(ticket)
        if all(queues.values()):
            tickets = [queues[rank].popleft() for rank in ranks]
            answers = self._group.carry(ranks, [ticket.request for ticket in tickets])
            for each, answer in zip(tickets, answers, strict=True):
                each.answer, each.is_done = answer, True
        return ticket

    def _give_up(self) -> None:
        """Handle a deadlock: all ranks wait for ranks that have ended, or for requests nobody
        makes."""
        gone = set(range(self._group.size)) - self.alive.keys()
        if self._raises and gone:
            raise DisagreementError("some workers ended their exchange before the others")
        stuck = [
            rank
            for rank, ticket in self._waiting.items()
            if gone.intersection(self._group.members(rank, ticket.request.group))
        ]
        who = f"rank {', '.join(map(str, sorted(gone)))} of {self._group.size}"
        error = (
            ExchangeError(f"the exchange cannot continue: {who} ended") if stuck else _different()
        )
        for rank in stuck or list(self.alive):
            del self._waiting[rank]
            self._advance(rank, None, error)


def answer_all(requests: Sequence[Request]) -> list[Any]:
    """Return the answer that each rank gets when all have made their requests."""
    first = requests[0]
    payloads = [request.payload for request in requests]
    alike = all((r.op, r.group, r.root) == (first.op, first.group, first.root) for r in requests)
    if not alike or len({payload.shape for payload in payloads}) != 1:
        raise _different()
    if first.op == "all_gather":
        return [payloads] * len(requests)
    if first.op == "all_to_all":
        return [[payload[rank] for payload in payloads] for rank in range(len(requests))]
    told = payloads[first.root]  # since that rank may write to it while others still read
    return [told if rank == first.root else told.clone() for rank in range(len(requests))]


def _different() -> DisagreementError:
    return DisagreementError("workers asked for different things: their schemes or layouts differ")
