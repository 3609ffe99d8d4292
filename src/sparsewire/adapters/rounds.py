"""The exchanges of a model's updates, one per round, on the exchange thread if there is one."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Literal

import torch

from ..errors import CorruptMessageError, DisagreementError, NonFiniteError, SparsewireError
from ..exchange import NonFinite
from ..groups import drive
from ..groups.connection import Connection
from ..groups.environment import Environment, Pending
from ..groups.thread import ExchangeThread
from .base import Meeting, leave
from .updates import Updates

Found = tuple[NonFinite | None, float]


class Rounds:
    """Ends rounds: collects the update, exchanges it, and moves the shared weights.

    Arguments:
        updates: The updates to exchange.
        meeting: The groups of the exchange.
        delay: 1 if a round's exchange ends with the next round, else 0.
        on_nonfinite: `'raise'` if a round that no rank takes is an error.
    """

    def __init__(
        self,
        updates: Updates,
        meeting: Meeting,
        delay: int,
        on_nonfinite: Literal["raise", "skip"],
    ) -> None:
        self.meeting = meeting
        self.error: SparsewireError | None = None  # the last failure
        self.thread: ExchangeThread | None = None
        self._updates = updates
        self._delay = delay
        self._on_nonfinite = on_nonfinite
        self._pending: Pending[Found] | None = None  # of the exchange under way
        self._device = updates.weights.device
        on_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_cuda else None  # type: ignore[no-untyped-call]
        if isinstance(meeting.group, Connection):
            self.thread = ExchangeThread(meeting.group, self._break)

    @property
    def is_under_way(self) -> bool:
        """Whether an exchange has begun whose result is not applied yet."""
        return self._pending is not None

    def end(self) -> None:
        """End a round, and begin the next."""
        if self.thread is not None and self.thread.broken is not None and not self.is_under_way:
            self._updates.begin()
            raise self.thread.broken
        if self._delay:
            self.finish()
            self._updates.collect()
            self._updates.begin_early()
            self._start()
        else:
            self._updates.collect()
            self._start()
            self.finish(begins=True)

    def result(self) -> Found:
        """Wait for the exchange under way, and return its result."""
        assert self._pending is not None
        return self._pending.result()

    def finish(self, begins: bool = False) -> None:
        """Wait for the exchange under way, if there is one, and move the shared weights.

        With `begins`, begin the next round there, as after every error.
        """
        if self._pending is None:
            return
        number = self._updates.session.steps
        try:
            found, ahead = self.result()  # `_break` may fail it in the meantime
        except SparsewireError as error:
            self.error = error
            self._updates.begin()
            raise
        finally:
            self._pending = None
        raises = found is not None and self._on_nonfinite == "raise"
        self._updates.apply(found, ahead, begins or raises)
        if raises:
            self.error = NonFiniteError(
                f"NaN or infinity at step {number}: {found}. No rank took the step: weights and "
                f"residual are those before it. Find the cause, or pass on_nonfinite='skip' to "
                f"leave such steps out on the rank that has them"
            )
            raise self.error

    def forget(self) -> None:
        """Wait for the exchange under way, if there is one, and drop its result."""
        if self._pending is not None:
            with suppress(SparsewireError):
                self.result()
            self._pending = None

    def resume(self, found: Found) -> None:
        """Continue as if an exchange with this result were under way."""
        self._pending = self._new_pending()
        self._pending.keep(found)

    def leave(self) -> None:
        """Stop the exchange thread, and leave the groups."""
        if self.thread is None:
            self.meeting.close()
        else:
            leave(self.thread, self.meeting)

    def _new_pending(self) -> Pending[Found]:
        return Pending(Environment()) if self.thread is None else self.thread.pending()

    def _start(self) -> None:
        """Start the exchange."""
        pending = self._pending = self._new_pending()
        if self.thread is None:
            self._exchange(pending, None)
            return
        event = None
        if self._stream is not None:
            event = torch.cuda.current_stream(self._device).record_event()
        if self.thread.broken is not None:
            self._break(self.thread.broken)
            return
        what = f"the exchange of step {self._updates.session.steps}"
        self.thread.submit(what, lambda: self._exchange(pending, event))

    @torch.no_grad()
    def _exchange(self, pending: Pending[Found], ready: torch.cuda.Event | None) -> None:
        """Run the exchange, on the exchange thread if there is one."""
        stream = torch.cuda.stream(self._stream) if self._stream else nullcontext()
        with stream:
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            routine = self._updates.exchange()
            try:
                found = drive(routine, self.meeting.driver, self._updates.session.counters)
            except (DisagreementError, CorruptMessageError) as error:
                # all ranks raise these at the same point: the group stays usable
                pending.fail(error)
                return
            if self._stream is not None:
                self._stream.synchronize()
            pending.keep(found)

    def _break(self, error: SparsewireError) -> None:
        """Fail the exchange under way, because the group is broken."""
        self.error = error
        if self._pending is not None:
            self._pending.fail(error)
