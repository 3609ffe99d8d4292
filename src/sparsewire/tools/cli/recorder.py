"""Records of a training, on their way to the metrics file, the display and the results.

Rank 0 makes them, in `train_rank.py`.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast

from sparsewire.notation import short
from sparsewire.report import human_bytes, plural

from ..bench.compare import Result
from .errors import explaining
from .progress import Progress
from .worker import Record, encode


class Recorder(ExitStack):
    """Takes the records of one or more runs; leaving its context gives the terminal back."""

    def __init__(self, metrics: Path | None, append: bool, quiet: bool) -> None:
        super().__init__()
        self.results: list[Result] = []
        self._run: Record = {}
        self._epochs: list[Record] = []
        self._stream = _open(metrics, append) if metrics else None
        if self._stream:
            self.callback(self._stream.close)
        self._progress = None if quiet else self.enter_context(Progress())

    def __call__(self, record: Record) -> None:
        """Take one record; it is in the metrics file when this returns."""
        if self._stream:
            with explaining("write metrics"):
                self._stream.write(f"{encode(record)}\n".encode())
        if record["record"] == "run":
            self._run, self._epochs = record, []
        elif record["record"] == "epoch":
            self._epochs.append(record)
        elif record["record"] == "summary":
            self.results.append(Result(record, self._epochs))
        if self._progress:
            self._show(self._progress, record)

    def _show(self, shown: Progress, record: Record) -> None:
        kind, run = record["record"], self._run
        if kind == "run":
            number = f"[{run['run']}/{run['runs']}] " if run["runs"] > 1 else ""
            title = f"{number}{short(run['scheme'])}, {plural(run['workers'], 'worker')}"
            shown.begin(title, run["steps"], run["step"])
        elif kind == "summary":
            told = f"accuracy {record['test_accuracy']:.2%}, {cost(record)}"
            if run["runs"] > 1:  # else it is printed as the result
                shown.keep(f"{short(run['scheme'])}: {told}")
        else:
            accuracy = f"accuracy {self._epochs[-1]['test_accuracy']:.2%}  " if self._epochs else ""
            told = f"loss {record['loss']:.4f}  {accuracy}{cost(record)}"
            shown.update(record["step"], told)
            if kind == "epoch":
                shown.log(
                    f"  epoch {record['epoch']}/{run['config']['epochs']}  {told}  "
                    f"{1000 * record['step_seconds']:.1f} ms/step"
                )


def cost(record: Record) -> str:
    """Describe what a step sends, compared with dense DDP."""
    reduction = record["reduction"]
    if 0.95 <= reduction < 1.05:
        against = "as much as dense"
    elif reduction > 1:
        against = f"{reduction:.1f}× less than dense"
    else:
        against = f"{1 / reduction:.1f}× more than dense"
    return f"{human_bytes(record['bytes_per_step'])}/step, {against}"


def _open(path: Path, append: bool) -> BinaryIO:
    with explaining("write metrics to"):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer, a stopped run keeps its records, and closing cannot fail.
        return cast(BinaryIO, open(path, "ab" if append else "wb", buffering=0, opener=_private))


def _private(path: str, flags: int) -> int:
    """Open a file; a new one is readable for its owner only."""
    return os.open(path, flags, 0o600)
