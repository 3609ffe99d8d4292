"""Ctrl-C as a request: counted, so that a command can end its processes in order."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Counts Ctrl-C, SIGTERM and a closed terminal instead of being ended by them."""

    def __init__(self) -> None:
        self.count = 0
        self.last = signal.SIGINT
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.last = signal.Signals(number)
