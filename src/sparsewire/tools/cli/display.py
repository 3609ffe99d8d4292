"""What people see while a run goes on: a live bar on a terminal, one line an epoch elsewhere.

All of it goes to standard error; standard output is for results.
"""

from __future__ import annotations

import sys
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from sparsewire.notation import short
from sparsewire.report import human_bytes, plural

from .records import Record


class Display(Protocol):
    """Shows records as they come."""

    def show(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Give the terminal back."""


def choose(quiet: bool) -> Display:
    """The display that fits: none if `quiet`, live only on a terminal."""
    if quiet:
        return Silent()
    return Live() if sys.stderr.isatty() else Lines()


def cost(record: Record) -> str:
    """What a step sends, and how much less than dense that is."""
    reduction = record["reduction"]
    if 0.95 <= reduction < 1.05:
        against = "as much as dense"
    elif reduction > 1:
        against = f"{reduction:.1f}× less than dense"
    else:
        against = f"{1 / reduction:.1f}× more than dense"
    return f"{human_bytes(record['bytes_per_step'])}/step, {against}"


class Silent:
    """Shows nothing."""

    def show(self, record: Record) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing to give back."""


class Lines:
    """One plain line when a run begins and one after every epoch, for logs and pipes."""

    def __init__(self) -> None:
        self._epochs = 0

    def show(self, record: Record) -> None:
        """Print a line for the records that are worth one."""
        if record["record"] == "run":
            self._epochs = record["config"]["epochs"]
            self._print(f"{_title(record)}, {plural(record['workers'], 'worker')}")
        elif record["record"] == "epoch":
            self._print(
                f"  epoch {record['epoch']}/{self._epochs}  loss {record['loss']:.4f}  "
                f"accuracy {record['test_accuracy']:.2%}  {cost(record)}  "
                f"{1000 * record['step_seconds']:.1f} ms/step"
            )

    def close(self) -> None:
        """Nothing to give back."""

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class Live:
    """A bar for each run, with loss, accuracy and bytes beside it."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        # Long schemes are cut so that the numbers beside them stay in sight.
        title = Column(no_wrap=True, max_width=max(console.width - 64, 16))
        self._progress = Progress(
            TextColumn("{task.description}", table_column=title, markup=False),
            BarColumn(bar_width=10),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[told]}", style="cyan", table_column=Column(no_wrap=True)),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = TaskID(0)
        self._accuracy = ""
        self._progress.start()

    def show(self, record: Record) -> None:
        """Move the bar."""
        kind = record["record"]
        if kind == "run":
            self._accuracy = ""
            self._task = self._progress.add_task(
                _title(record), total=record["steps"], completed=record["step"], told=""
            )
        elif kind == "summary":
            told = f"accuracy {record['test_accuracy']:.2%}  {_numbers(record)}"
            self._progress.update(self._task, completed=record["step"], told=told)
            self._progress.stop_task(self._task)
        else:
            if kind == "epoch":
                self._accuracy = f"{record['test_accuracy']:.2%}  "
            told = f"loss {record['loss']:.3f}  {self._accuracy}{_numbers(record)}"
            self._progress.update(self._task, completed=record["step"], told=told)

    def close(self) -> None:
        """Leave the bars as they stand and show the cursor again."""
        self._progress.stop()


def _numbers(record: Record) -> str:
    return f"{human_bytes(record['bytes_per_step'])}/step  {record['reduction']:.1f}×"


def _title(record: Record) -> str:
    number = f"[{record['run']}/{record['runs']}] " if record["runs"] > 1 else ""
    return f"{number}{short(record['scheme'])}"
