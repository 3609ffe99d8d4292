"""The exchange thread: runs one rank's exchanges in order while backward continues.

Every future that is handed out completes or fails. It is completed by the thread itself, and failed
when the deadline passes, when a signal arrives, or when another rank reports that the group broke.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ExchangeError, SparsewireError
from .connection import Connection
from .environment import Once, Pending
from .liveness import GRACE, Liveness

log = logging.getLogger("sparsewire.thread")

POLL = 0.25  # seconds between two checks of the store and the clock
JOIN = 1.0  # seconds that threads get to end
LINGER = 1.0  # seconds without progress and without a store, after which an exchange has failed


class Promise:
    """A torch future that is completed exactly once, by whichever thread is first."""

    def __init__(self, device: torch.device) -> None:
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[device] if device.type != "cpu" else None
        )
        self._once = Once()

    def keep(self, result: torch.Tensor) -> None:
        if self._once.close():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if self._once.close():
            # a RuntimeError with the name in its text: torch shows only the text
            self.future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))  # type: ignore[arg-type]


class Watch:
    """Decides when an exchange has failed: at the deadline, by others' reports, or on Ctrl-C.

    It has no threads, and its clock and store are those of `liveness`. `on_failure` is called once
    with the error that ended the group, on whichever thread noticed it.
    """

    def __init__(self, liveness: Liveness, on_failure: Callable[[SparsewireError], None]) -> None:
        self.broken: SparsewireError | None = None
        self._liveness = liveness
        self._on_failure = on_failure
        self._once = Once()

    def fail(self, error: SparsewireError, level: int = logging.ERROR) -> None:
        """Break the group for good. Only the first error counts, and it is logged."""
        if not self._once.close():
            return
        self.broken = error
        try:
            self._on_failure(error)  # first, because another thread waits for it
        finally:
            self._liveness.give_up(error)
        log.log(level, "%s", error)

    def check_deadline(self) -> None:
        """Break off an exchange that takes too long. Never waits for the store or the network."""
        elapsed, limit = self._liveness.progress.elapsed, self._liveness.timeout + GRACE
        if elapsed is not None and elapsed > limit:
            stall = TimeoutError(f"nothing moved for {limit:.0f} seconds")
            self.fail(self._liveness.failure(stall))

    def check_reports(self) -> None:
        """Check whether another rank reports a failure. May block for ever in the store."""
        try:
            note = self._liveness.alarmed()
        except RuntimeError:
            # the store is gone: its host may have finished training before the others
            is_stuck = self._liveness.progress.stuck_for > LINGER
            note = "the watcher: the store is out of reach" if is_stuck else None
        if note is not None:
            self.fail(self._liveness.failure(RuntimeError(f"reported by {note}")))

    def interrupt(self) -> None:
        """Break off the exchange under way, if there is one."""
        progress = self._liveness.progress
        if progress.elapsed is not None:
            self._liveness.fault = "was interrupted by Ctrl-C"
            self.fail(ExchangeError(f"{progress.doing} {self._liveness.fault}"))


class Watcher:
    """Watches the exchanges of one rank on two threads: one for the clock, one for others' reports.

    `on_failure` is called once with the error that ended the group, on whichever thread noticed it.
    """

    def __init__(self, liveness: Liveness, on_failure: Callable[[SparsewireError], None]) -> None:
        self.watch = Watch(liveness, on_failure)
        self._liveness = liveness
        self._environment = environment = liveness.environment
        self._stop = environment.event()
        liveness.progress.enter("finished")  # the meeting
        self._listener = environment.on_interrupt(self.watch.interrupt)
        self._threads = [
            environment.spawn(self._look_at_clock, "sparsewire-clock"),
            environment.spawn(self._listen, "sparsewire-reports"),
        ]
        _running.add(self)

    @property
    def broken(self) -> SparsewireError | None:
        """The error that ended the group."""
        return self.watch.broken

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    def stop(self) -> None:
        """End the threads."""
        _running.discard(self)
        self._stop.set()
        self._join()

    def _join(self) -> None:
        end = self._environment.now() + 2 * POLL
        for thread in self._threads:
            if not self._environment.is_current(thread):
                thread.join(max(0.0, end - self._environment.now()))

    def _look_at_clock(self) -> None:
        while self.broken is None and not self._stop.wait(POLL):
            self.watch.check_deadline()

    def _listen(self) -> None:
        """Wait for other ranks' reports. It may block for ever, so no thread waits for this one."""
        if self._liveness.is_alone:
            return
        while self.broken is None and not self._stop.wait(POLL):
            self.watch.check_reports()
        if self.broken is not None:
            with contextlib.suppress(RuntimeError):
                self._liveness.alarm(str(self.broken))  # unless it was done already
                self._liveness.answer()  # for the last time


class ExchangeThread(Watcher):
    """Runs jobs one after another on its own thread, and breaks off when there is no progress."""

    def __init__(self, group: Connection, on_failure: Callable[[SparsewireError], None]) -> None:
        self.group = group
        self._jobs = group.liveness.environment.queue()
        super().__init__(group.liveness, on_failure)
        self._threads.append(self._environment.spawn(self._work, "sparsewire-exchange"))

    def pending(self) -> Pending[Any]:
        """Return the promise of a result, for another thread of this rank to wait for."""
        return Pending(self._environment)

    def submit(self, what: str, job: Callable[[], None]) -> None:
        """Queue a job. Errors call it `what`."""
        self._jobs.put((what, job))

    def stop(self) -> None:
        """End the threads, after the job under way unless that takes long."""
        self._stop.set()
        self._jobs.put(None)
        super().stop()
        self.group.liveness.given_up = True
        self._join()

    def _work(self) -> None:
        while self.broken is None and (entry := self._jobs.get()) and not self.is_stopped:
            what, job = entry
            self.group.doing = what
            try:
                job()
            except SparsewireError as error:
                self._fail(error)
            except BaseException as error:  # whatever it is, threads that wait must learn of it
                self._fail(self.group.failure(error))
            else:
                self.group.finish()

    def _fail(self, error: SparsewireError) -> None:
        self.watch.fail(error, logging.DEBUG if self.is_stopped else logging.ERROR)


_running: weakref.WeakSet[Watcher] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop all threads: one that wakes up inside a dying interpreter would abort the process."""
    for thread in list(_running):
        thread.stop()


os.register_at_fork(after_in_child=_running.clear)  # a child has none of these threads
