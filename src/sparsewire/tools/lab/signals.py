"""Signals: counted, postponed while something is cleaned up, or unwinding `with` blocks."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

_FATAL = (signal.SIGTERM, signal.SIGHUP)


class Unwinding:
    """Makes SIGTERM and SIGHUP unwind `with` blocks, unless another handler is installed."""

    def __init__(self) -> None:
        self._taken: list[signal.Signals] = []

    def begin(self) -> None:
        """Take the signals that would end the process on the spot."""
        if _in_main_thread():
            self._taken = [n for n in _FATAL if signal.getsignal(n) is signal.SIG_DFL]
            for number in self._taken:
                signal.signal(number, _unwind)

    def end(self) -> None:
        """Restore the default handlers."""
        if _in_main_thread():
            for number in self._taken:
                signal.signal(number, signal.SIG_DFL)
            self._taken = []


class Interrupts:
    """Counts Ctrl-C, SIGTERM and a closed terminal instead of being ended by them."""

    def __init__(self) -> None:
        self.count = 0
        self.last = signal.SIGINT
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, *_FATAL):
            if signal.getsignal(number) is not None:  # None cannot be set again
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.last = signal.Signals(number)


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Postpone Ctrl-C and similar signals to the end of the block, in the main thread."""
    if not _in_main_thread():
        yield
        return
    interrupts = Interrupts()
    try:
        with interrupts:
            yield
    finally:
        if interrupts.count:
            signal.raise_signal(interrupts.last)


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
