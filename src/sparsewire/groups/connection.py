"""A rank's connection to the others: it carries out requests and explains failures."""

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
    """The collectives of a transport. Each begins at once, and `wait` waits for its end."""

    def gather(self, output: Tensor, payload: Tensor) -> Work:
        """Begin to gather every rank's payload into `output`, in rank order."""

    def deliver(self, output: Tensor, rows: Tensor) -> Work:
        """Begin an all-to-all: row r goes to rank r, and this rank's rows arrive in `output`."""

    def show(self, payload: Tensor, root: int) -> Work:
        """Begin to broadcast the payload of rank `root` into the payloads of all ranks."""

    def wait(self, work: Work, is_given_up: Callable[[], bool]) -> bool:
        """Wait until an operation ends or is given up. Return whether it has ended."""


@dataclass(frozen=True)
class Ticket:
    """A request under way: what to wait for, and a function that then returns the answer."""

    work: Work | None
    answer: Callable[[], Any]


class Connection:
    """The ranks of a group, connected by a transport.

    Arguments:
        rank, size: This rank, and the number of ranks.
        liveness: Finds out, together with the other ranks, why something failed.
        device: The device from which messages are sent.
        transport: Carries the messages. A rank alone needs none.
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
        """Return the result of `call`, or raise at the deadline: its store may never answer.

        :meta private:
        """
        limit, on_cuda = self.timeout + GRACE, self._device.type == "cuda"

        def on_device() -> Result:
            with torch.cuda.device(self._device) if on_cuda else nullcontext():
                return call()  # on another thread, and each thread has its own current device

        try:
            return self.liveness.environment.within(limit, on_device)
        except RuntimeError as cause:
            raise self.failure(cause) from cause
        except TimeoutError as cause:
            late = self.failure(TimeoutError(f"it took more than {limit:.0f} seconds"))
            self.liveness.give_up(late)  # the thread that was left behind must not stay in Gloo
            raise late from cause

    def find_common(self, what: str, spares: Iterable[int]) -> int | None:
        """Return the lowest of these numbers that all ranks have; None if there is none.

        A model that is deleted without `detach` frees its groups on some ranks sooner than on
        others.

        :meta private:
        """
        if self.size == 1:
            return min(spares, default=None)
        return self.limited(lambda: self._find_common(what, spares))

    def _arrive(self, store: Store, spares: Iterable[int]) -> int | None:
        """Join the first meeting of all ranks. Return the lowest number that all of them have."""
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
        """Delete this rank's keys of an earlier meeting, which the store would keep."""
        with suppress(RuntimeError, NotImplementedError):  # not every store can delete
            for what in ("come", "doubles", "pairs"):
                store.delete_key(f"{what}/{self.rank}")

    @property
    def doing(self) -> str:
        """The operation under way, as error messages name it."""
        return self.liveness.progress.doing

    @doing.setter
    def doing(self, what: str) -> None:
        self.liveness.progress.begin(what)

    def finish(self) -> None:
        """Note that nothing is under way any more."""
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
        """Wait until a request has ended, and return its answer."""
        liveness = self.liveness
        end = liveness.environment.now() + self.timeout + GRACE

        def is_given_up() -> bool:
            return liveness.given_up or liveness.environment.now() > end

        try:
            if ticket.work is not None:
                liveness.progress.enter("waiting")
                if not self._transport.wait(ticket.work, is_given_up):
                    if not liveness.given_up:  # no watcher runs, as while attaching
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
        """Tell the other ranks, find out who is missing, and return the error to raise."""
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
