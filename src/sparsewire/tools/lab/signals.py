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
    """Has SIGTERM and SIGHUP leave `with` blocks one by one, where nobody else handles them."""

    def __init__(self) -> None:
        self._taken: list[signal.Signals] = []

    def begin(self) -> None:
        """Take the signals that would end the process on the spot."""
        if _in_main_thread():
            self._taken = [n for n in _FATAL if signal.getsignal(n) is signal.SIG_DFL]
            for number in self._taken:
                signal.signal(number, _unwind)

    def end(self) -> None:
        """Give them back."""
        if _in_main_thread():
            for number in self._taken:
                signal.signal(number, signal.SIG_DFL)
            self._taken = []


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Let Ctrl-C and its like wait until this is done. Only the main thread ever notices them."""
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
