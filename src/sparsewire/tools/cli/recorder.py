"""Where records go: the display, the metrics file, and the results kept for the end."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from sparsewire.notation import short

from ..bench.timing import Timing
from . import display
from .errors import explain_os_error
from .records import Record, encode


@dataclass(frozen=True)
class Result:
    """How one run ended, and what it told after each epoch."""

    summary: Record
    epochs: list[Record]

    @property
    def name(self) -> str:
        """The scheme as people write it."""
        return short(str(self.summary["scheme"]))

    @property
    def timing(self) -> Timing:
        """The time of a step, and its spread."""
        return Timing(self.summary["step_seconds"], *self.summary["step_quartiles"])

    @property
    def accuracies(self) -> list[float]:
        """Test accuracy after every epoch."""
        return [epoch["test_accuracy"] for epoch in self.epochs]

    @property
    def times(self) -> list[float]:
        """Seconds of training until the end of every epoch, tests left out."""
        return [epoch["train_seconds"] for epoch in self.epochs]


class Recorder(ExitStack):
    """Takes the records of one or more runs; leaving its context gives the terminal back."""

    def __init__(self, metrics: Path | None, append: bool, quiet: bool) -> None:
        super().__init__()
        self.results: list[Result] = []
        self._epochs: list[Record] = []
        self._stream = _open(metrics, append) if metrics else None
        if self._stream:
            self.callback(self._stream.close)
        self._display = display.choose(quiet)
        self.callback(self._display.close)

    def __call__(self, record: Record) -> None:
        """Take one record; it is in the metrics file when this returns."""
        if self._stream:
            try:
                self._stream.write(f"{encode(record)}\n".encode())
            except OSError as error:
                raise explain_os_error(error, "write metrics") from None
        if record["record"] == "run":
            self._epochs = []
        elif record["record"] == "epoch":
            self._epochs.append(record)
        elif record["record"] == "summary":
            self.results.append(Result(record, self._epochs))
        self._display.show(record)


def _open(path: Path, append: bool) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer: a stopped run leaves what it told, and closing cannot fail.
        return cast(BinaryIO, open(path, "ab" if append else "wb", buffering=0, opener=_private))
    except OSError as error:
        raise explain_os_error(error, "write metrics to") from None


def _private(path: str, flags: int) -> int:
    """Open a file that, if it is new, nobody else may read."""
    return os.open(path, flags, 0o600)
