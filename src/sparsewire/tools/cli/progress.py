"""How far a run is, for people: a live bar on a terminal, plain lines in logs and pipes.

All of it goes to standard error; standard output is for results. Whoever runs something knows what
to say about it; this knows how to show it.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column


def choose(quiet: bool) -> Progress:
    """The display that fits: none if `quiet`, live only on a terminal."""
    if quiet:
        return Progress()
    return Live() if sys.stderr.isatty() else Lines()


class Progress:
    """Shows nothing."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        """Give the terminal back."""

    def begin(self, title: str, total: int | None = None, done: int = 0) -> None:
        """Something begins that has so many steps; None if nobody knows."""

    def update(
        self, done: int, told: str, title: str | None = None, total: int | None = None
    ) -> None:
        """So many steps are done, and this is how it goes."""

    def log(self, line: str) -> None:
        """What the bar has said already, for those who have no bar."""

    def keep(self, line: str, style: str | None = None) -> None:
        """An outcome, which stays in sight."""


class Lines(Progress):
    """One plain line for everything that is worth one."""

    def begin(self, title: str, total: int | None = None, done: int = 0) -> None:
        """Print the title."""
        self.log(title)

    def log(self, line: str) -> None:
        """Print it."""
        print(line, file=sys.stderr, flush=True)

    def keep(self, line: str, style: str | None = None) -> None:
        """Print it."""
        self.log(f"  {line}")


class Live(Progress):
    """One bar, with a title, a few numbers and the time that is left beside it."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        # Long schemes are cut so that the numbers beside them stay in sight.
        title = Column(no_wrap=True, max_width=max(console.width - 64, 16))
        self._bar = Bar(
            TextColumn("{task.description}", table_column=title, markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[told]}", style="cyan", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, told="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Take the bar away and show the cursor again."""
        self._bar.stop()

    def begin(self, title: str, total: int | None = None, done: int = 0) -> None:
        """Begin with a new bar."""
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(title, total=total, completed=done, told="")

    def update(
        self, done: int, told: str, title: str | None = None, total: int | None = None
    ) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=done, told=told, description=title, total=total)

    def keep(self, line: str, style: str | None = None) -> None:
        """Leave it above the bar."""
        self._bar.console.print(line, style=style, markup=False, highlight=False)
