"""Time and threads, as the exchange thread and its watcher use them.

Tests pass an environment of their own: a virtual clock, and threads that run in an order that a
seed decides.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from .signals import Listener

Result = TypeVar("Result")


class Event(Protocol):
    """The part of `threading.Event` that is used here."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None, /) -> bool: ...


class Queue(Protocol):
    """The part of `queue.SimpleQueue` that is used here."""

    def put(self, item: Any, /) -> None: ...

    def get(self) -> Any: ...


class Thread(Protocol):
    """The part of `threading.Thread` that is used here."""

    def join(self, timeout: float | None = None, /) -> None: ...


class Environment:
    """The clock and the threads of this machine."""

    def now(self) -> float:
        """Return seconds since some moment in the past."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let this thread sleep."""
        time.sleep(seconds)

    def spawn(self, run: Callable[[], None], name: str) -> Thread:
        """Start a thread, which ends with the process."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        _spawned.add(thread)
        thread.start()
        return thread

    def is_current(self, thread: Thread) -> bool:
        """Return whether a thread is the calling one."""
        return thread is threading.current_thread()

    def lock(self) -> AbstractContextManager[Any]:
        """Return a lock, for use where it may be held for seconds."""
        return threading.Lock()

    def event(self) -> Event:
        """Return an event that is not set."""
        return threading.Event()

    def queue(self) -> Queue:
        """Return an empty queue."""
        return queue.SimpleQueue()

    def on_interrupt(self, react: Callable[[], None]) -> object:
        """Call `react` on Ctrl-C, for as long as the returned object is referenced."""
        return Listener(react)

    def within(self, seconds: float, call: Callable[[], Result]) -> Result:
        """Return the result of `call`, or raise TimeoutError after `seconds`.

        The call runs on a thread of its own. If it takes too long, that thread is abandoned: a call
        to a store whose host is frozen or cut off never returns.
        """
        answer: Pending[Result] = Pending(self)

        def run() -> None:
            try:
                answer.keep(call())
            except BaseException as error:
                answer.fail(error)

        self.spawn(run, "sparsewire-limited")
        return answer.result(seconds)


class Once:
    """Something that may happen only once, whoever is first."""

    def __init__(self) -> None:
        self._is_open = True
        self._guard = threading.Lock()

    def close(self) -> bool:
        """Return whether this is the first call."""
        with self._guard:
            was_open, self._is_open = self._is_open, False
        return was_open


class Pending(Generic[Result]):
    """A result that another thread will provide. Only the first result or error counts."""

    def __init__(self, environment: Environment) -> None:
        self._once = Once()
        self._is_there = environment.event()
        self._result: Result
        self._error: BaseException | None = None

    def keep(self, result: Result) -> None:
        """Provide the result."""
        if self._once.close():
            self._result = result
            self._is_there.set()

    def fail(self, error: BaseException) -> None:
        """Provide an error, which `result` raises."""
        if self._once.close():
            self._error = error
            self._is_there.set()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result. Raise TimeoutError after `timeout` seconds."""
        if not self._is_there.wait(timeout):
            raise TimeoutError(f"no result within {timeout} seconds")
        if self._error is not None:
            raise self._error
        return self._result


_spawned: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _keep_exit_status() -> None:
    """Keep a thread that is still inside C++ from aborting the process while the interpreter ends.

    Such a thread may wait for a store whose host is frozen. If the call returns while the
    interpreter finalises, Python before 3.14 unwinds the thread, C++ calls `std::terminate`, and
    the exit status becomes SIGABRT. With `pause` as the handler of `std::terminate`, the thread
    waits instead, and the process ends as its script decided. `os._exit` here would not know the
    argument of `sys.exit`.
    """
    # runs after `thread._stop_all`, which is registered later
    if sys.version_info >= (3, 14) or not any(thread.is_alive() for thread in _spawned):
        return
    with contextlib.suppress(OSError, AttributeError):  # only glibc unwinds threads that end
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        set_terminate.restype = None
        set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
