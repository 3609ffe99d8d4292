"""A network between simulated ranks on which chance decides what goes wrong, and who goes next."""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.groups.simulated import SimulatedGroup
from sparsewire.requests import Request, Routine, Step


class Violation(AssertionError):
    """Something that must not happen, whatever goes wrong on the network."""


class Killed(sw.errors.ExchangeError):
    """The end of a process: nobody sees this error."""


class Unknown(sw.errors.ExchangeError):
    """An error of a kind that sparsewire does not know."""


@dataclass
class Corruption:
    """One message that arrives corrupt.

    Arguments:
        number: of the message, as the ranks of a step make their requests.
        at_all: it does so at all ranks but its sender, else at one of them.
    """

    number: int
    at_all: bool
    group: str = ""  # filled in when it happens: the group of ranks, and the sender in it
    sender: int = -1


class Network(SimulatedGroup):
    """Carries requests, in an order that chance decides; one message may arrive corrupt.

    `count` is how many requests were carried in this step.
    """

    def __init__(self, size: int, chance: random.Random, **groups: Sequence[Sequence[int]]) -> None:
        super().__init__(size, **groups)
        self.corruption: Corruption | None = None
        self.count = 0
        self._chance = chance

    def pick(self, ready: Sequence[int]) -> int:
        return self._chance.choice(ready)

    def carry(self, ranks: Sequence[int], requests: Sequence[Request]) -> list[Any]:
        first = requests[0]
        kinds = {(r.op, r.root, r.payload.shape) for r in requests}
        if len(kinds) > 1:
            raise Violation(f"ranks {ranks} were paired with different requests: {kinds}")
        # copies, as a network makes them: a rank may go on and write to its buffers again
        answers = [_copy(answer) for answer in super().carry(ranks, requests)]
        if self.corruption is not None and self.corruption.number == self.count:
            self._corrupt(self.corruption, first, answers)
        self.count += 1
        return answers

    def _corrupt(self, what: Corruption, request: Request, answers: list[Any]) -> None:
        places = range(len(answers))
        sender = request.root if request.op == "broadcast" else self._chance.choice(places)
        receivers = [place for place in places if place != sender]
        if not receivers or not request.payload.numel():
            return
        what.group, what.sender = request.group, sender
        damage = self._chance.choice((self._flip, self._scramble, self._swap))
        for receiver in receivers if what.at_all else [self._chance.choice(receivers)]:
            answer = answers[receiver]
            damage([answer] if isinstance(answer, Tensor) else answer, sender)

    def _flip(self, rows: list[Tensor], sender: int) -> None:
        part = self._part(rows, sender)
        part[self._chance.randrange(part.numel())] ^= 1 << self._chance.randrange(8)

    def _scramble(self, rows: list[Tensor], sender: int) -> None:
        part = self._part(rows, sender)
        data = self._chance.randbytes(part.numel())
        part.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _part(self, rows: list[Tensor], sender: int) -> Tensor:
        """The sender's message, or its beginning or end: short parts of it have to be met too."""
        row = rows[sender] if len(rows) > 1 else rows[0]
        return self._chance.choice((row, row[:1], row[-64:]))

    def _swap(self, rows: list[Tensor], sender: int) -> None:
        """Another rank's message arrives in place of the sender's; zeros, if there is one only."""
        if len(rows) > 1:
            rows[sender].copy_(rows[sender - 1])
        else:
            rows[0].zero_()


def _copy(answer: Any) -> Any:
    return answer.clone() if isinstance(answer, Tensor) else [row.clone() for row in answer]


def until(routine: Routine[Any], requests: int, error: Exception) -> Generator[Step, Any, Any]:
    """Run a rank's routine, and raise an error in it after so many requests.

    `Killed` ends the rank at once. Any other is an error of its own, which its driver reports.
    """
    answer: Any = None
    failure: Exception | None = None
    try:
        for number in itertools.count():
            if number == requests:
                if isinstance(error, Killed):
                    raise error
                failure = error
            step = routine.send(answer) if failure is None else routine.throw(failure)
            answer = failure = None
            try:
                answer = yield step
            except sw.SparsewireError as raised:
                failure = raised
    except StopIteration as end:
        return end.value
    except MemoryError as own:
        raise sw.errors.ExchangeError(f"this rank failed by itself: {own}") from own
    finally:
        routine.close()
