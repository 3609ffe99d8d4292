"""The exchange thread: does one rank's exchanges in order while backward goes on.

Every promise handed out is kept or broken, never forgotten: by the thread itself, by a clock when
the deadline passes, or when a signal arrives or another rank reports that the group is broken.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable

import torch

from ..errors import ExchangeError, SparsewireError
from .distributed import DistributedGroup
from .signals import Listener

log = logging.getLogger("sparsewire.thread")

POLL = 0.5  # seconds between looks at the store and the clock
GRACE = 5.0  # seconds that the backend's own deadline gets to speak first


class Promise:
    """A torch future that is completed exactly once, whoever comes first."""

    def __init__(self, device: torch.device) -> None:
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[device] if device.type != "cpu" else None
        )
        self._open = True
        self._lock = threading.Lock()

    def _close(self) -> bool:
        with self._lock:
            was_open, self._open = self._open, False
        return was_open

    def keep(self, result: torch.Tensor) -> None:
        if self._close():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if self._close():
            # a bare error as message: torch shows only the text of what is set here
            self.future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))  # type: ignore[arg-type]


class ExchangeThread:
    """Runs jobs one after another on a thread of its own, and breaks off when nothing moves.

    `on_failure` is called once with the error that ended the group, from whichever thread saw it.
    """

    def __init__(self, group: DistributedGroup, on_failure: Callable[[SparsewireError], None]):
        self.group = group
        self.broken: SparsewireError | None = None
        self._on_failure = on_failure
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[], None]] | None] = queue.SimpleQueue()
        self._job: tuple[str, float] | None = None  # what runs now, and since when
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name="sparsewire-exchange", daemon=True),
            threading.Thread(target=self._watch, name="sparsewire-clock", daemon=True),
            threading.Thread(target=self._listen, name="sparsewire-reports", daemon=True),
        ]
        self._listener = Listener(self._interrupt)
        for thread in self._threads:
            thread.start()
        _running.add(self)

    def submit(self, what: str, job: Callable[[], None]) -> None:
        """Queue a job; `what` names it in errors."""
        self._jobs.put((what, job))

    def stop(self) -> None:
        """End the threads."""
        _running.discard(self)
        self._stop.set()
        self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=2 * POLL)

    def fail(self, error: SparsewireError) -> None:
        """The group is broken for good; the first reason counts."""
        with self._lock:
            if self.broken is not None:
                return
            self.broken = error
        log.error("%s", error)
        self._on_failure(error)

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None and not self._stop.is_set():
            what, job = entry
            self._job = (what, time.monotonic())
            self.group.doing = what
            try:
                job()
            except SparsewireError as error:
                self.fail(error)
            except Exception as error:
                self.fail(self.group.failure(error))
            finally:
                self._job = None

    def _watch(self) -> None:
        """Enforce the deadline. Touches neither the store nor the network, which may both block."""
        limit = self.group.timeout + GRACE
        while self.broken is None and not self._stop.wait(POLL):
            job = self._job
            if job is not None and time.monotonic() - job[1] > limit:
                stall = TimeoutError(f"nothing moved for {limit:.0f} seconds")
                self.fail(self.group.failure(stall))

    def _listen(self) -> None:
        """Look for reports of other ranks in the store. May block there for ever: nobody waits."""
        liveness = self.group.liveness
        if liveness is None:
            return
        while self.broken is None and not self._stop.wait(POLL):
            try:
                note = liveness.alarmed()
            except RuntimeError:
                # no store any more: only worth a word while something waits for the others
                note = "the watcher: the store is out of reach" if self._job else None
            if note is not None:
                self.fail(self.group.failure(RuntimeError(f"reported by {note}")))
        if self.broken is not None:
            liveness.answer()  # and no more: a thread that stays in the store aborts the process

    def _interrupt(self) -> None:
        job = self._job
        if job is not None:
            self.fail(ExchangeError(f"{job[0]} was interrupted by Ctrl-C"))


_running: weakref.WeakSet[ExchangeThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Threads that wake up inside a dying interpreter would abort the process."""
    for thread in list(_running):
        thread.stop()
