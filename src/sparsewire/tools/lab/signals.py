"""Signals and cleaning up: an end by SIGTERM unwinds, and no Ctrl-C stops the cleaning half-way."""

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


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Postpone Ctrl-C and similar signals to the end of the block, in the main thread."""
    if not _in_main_thread():
        yield
        return
    came: list[int] = []
    before: dict[signal.Signals, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    for number in (signal.SIGINT, *_FATAL):
        if signal.getsignal(number) is not None:  # None cannot be set again
            before[number] = signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
