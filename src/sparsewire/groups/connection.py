"""One rank's way to the others: requests become collectives, and what goes wrong is explained."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import ExchangeError, SparsewireError
from ..requests import Request
from .liveness import GRACE, Liveness, Store
from .simulated import answer_all
from .transport import Work

Result = TypeVar("Result")


class Carrier(Protocol):
    """The collectives that a transport offers: they are begun, and `wait` waits for their end."""

    def gather(self, output: Tensor, payload: Tensor) -> Work:
        """Put every rank's payload into `output`, in rank order."""

    def deliver(self, output: Tensor, rows: Tensor) -> Work:
        """Give every rank its row, and put the rows that all have for this one into `output`."""

    def show(self, payload: Tensor, root: int) -> Work:
        """Put the payload of rank `root` into every rank's."""

    def wait(self, work: Work, is_given_up: Callable[[], bool]) -> bool:
        """Wait for the end of something, or until it is given up; return whether it has ended."""


@dataclass(frozen=True)
class Ticket:
    """A request under way: what to wait for, and what to call then."""

    work: Work | None
    answer: Callable[[], Any]


class Connection:
    """The ranks of a group, over a transport.

    Arguments:
        rank, size: this rank, and how many there are.
        liveness: what the ranks tell each other when something fails.
        device: where messages lie while they travel.
        transport: carries them; not needed by a rank alone.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        liveness: Liveness,
        device: torch.device,
        transport: Carrier | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = liveness.timeout
        self.liveness = liveness
        self._device = device
        self._is_closed = False
        self._is_abandoned = False
        if transport is not None:
            self._transport = transport

    def limited(self, call: Callable[[], Result]) -> Result:
        """Return what `call` returns; it may wait for a store that never answers.

        :meta private:
        """
        limit, on_cuda = self.timeout + GRACE, self._device.type == "cuda"

        def on_device() -> Result:
            with torch.cuda.device(self._device) if on_cuda else nullcontext():
                return call()  # on a thread, and each has a device of its own

        try:
            return self.liveness.environment.within(limit, on_device)
        except RuntimeError as cause:
            raise self.failure(cause) from cause
        except TimeoutError as cause:
            late = self.failure(TimeoutError(f"it took more than {limit:.0f} seconds"))
            self.liveness.give_up(late)  # the thread that was left behind must not stay in Gloo
            raise late from cause

    def find_common(self, what: str, spares: Iterable[int]) -> int | None:
        """Return the first of these numbers that every rank has, if there is one.

        A model that is deleted without `detach` leaves its groups on some ranks sooner than on
        others.

        :meta private:
        """
        if self.size == 1:
            return min(spares, default=None)
        return self.limited(lambda: self._find_common(what, spares))

    def _arrive(self, store: Store, spares: Iterable[int]) -> int | None:
        """Come to the first meeting; return the first of these numbers that every rank has."""
        self._store = store
        self.liveness.arrive(store)
        return self._find_common("doubles", spares)

    def _find_common(self, what: str, spares: Iterable[int]) -> int | None:
        self._store.set(f"{what}/{self.rank}", json.dumps(list(spares)))
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        self._store.wait(keys, datetime.timedelta(seconds=self.timeout))
        common = set.intersection(*(set(json.loads(self._store.get(key))) for key in keys))
        return min(common, default=None)

    def _forget(self, store: Store) -> None:
        """Take back what this rank wrote at an earlier meeting: the store would keep it."""
        with suppress(RuntimeError, NotImplementedError):  # not every store can
            for what in ("come", "doubles", "pairs"):
                store.delete_key(f"{what}/{self.rank}")

    @property
    def doing(self) -> str:
        """What is under way, for the words of an error."""
        return self.liveness.progress.doing

    @doing.setter
    def doing(self, what: str) -> None:
        self.liveness.progress.begin(what)

    def finish(self) -> None:
        """Nothing is under way any more."""
        self.liveness.progress.enter("finished")

    def start(self, request: Request) -> Ticket:
        """Begin a request together with all other ranks."""
        if self._is_closed:
            raise ExchangeError(f"{self.doing} cannot take place: the group was closed")
        if self.liveness.given_up:
            raise self._given_up()
        try:
            return self._start(request)
        except RuntimeError as cause:
            raise self.failure(cause) from cause

    def wait(self, ticket: Ticket) -> Any:
        """Wait for the end of a request, and return its answer."""
        liveness = self.liveness
        end = liveness.environment.now() + self.timeout + GRACE

        def is_given_up() -> bool:
            return liveness.given_up or liveness.environment.now() > end

        try:
            if ticket.work is not None:
                liveness.progress.enter("waiting")
                if not self._transport.wait(ticket.work, is_given_up):
                    if not liveness.given_up:  # nobody watches over it, as while attaching
                        raise TimeoutError(f"nothing moved for {self.timeout + GRACE:.0f} seconds")
                    raise self._given_up()
                liveness.progress.enter("computing")
            return ticket.answer()
        except SparsewireError:
            raise
        except (RuntimeError, TimeoutError) as cause:
            raise self.failure(cause) from cause

    def _given_up(self) -> SparsewireError:
        given_up = f"{self.doing} was given up, since the group is broken or detached"
        return self.liveness.reason or ExchangeError(given_up)

    def failure(self, cause: BaseException) -> ExchangeError:
        """What happened, after telling the other ranks and finding out who is missing."""
        return self.liveness.failure(cause)

    def abandon(self, error: ExchangeError) -> None:
        """Refuse every later request, and tell the other ranks why."""
        if self.size > 1 and not self.liveness.given_up:
            self._is_abandoned = True
            self.liveness.give_up(error)
            self.liveness.inquire(str(error))

    def _start(self, request: Request) -> Ticket:
        home = request.payload.device
        payload = request.payload.to(self._device).contiguous()
        if self.size == 1:
            answer = answer_all([request])[0]
            return Ticket(None, lambda: answer)
        if request.op == "broadcast":
            shown = payload if self.rank == request.root else torch.empty_like(payload)
            return Ticket(self._transport.show(shown, request.root), lambda: shown.to(home))
        rows = request.out
        if rows is None or rows.device != self._device:
            width = payload.numel() if request.op == "all_gather" else payload.shape[1]
            rows = payload.new_empty(self.size, width)
        arrived = rows
        if request.op == "all_gather":
            work = self._transport.gather(arrived.view(-1), payload)
        else:
            work = self._transport.deliver(arrived, payload)
        return Ticket(work, lambda: list(arrived.to(home)))
