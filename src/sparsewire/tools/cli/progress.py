"""Progress of a run: a live bar on a terminal, plain lines in logs and pipes.

All of it goes to standard error; standard output is for results. The commands decide what to say,
and this module how to show it.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column


class Progress:
    """A bar on a terminal, with a title, a few numbers and the time left; else plain lines.

    Args:
        quiet: show nothing at all.
        lines: show plain lines where there is no terminal.
    """

    def __init__(self, quiet: bool = False, lines: bool = True) -> None:
        is_live = not quiet and sys.stderr.isatty()
        self._bar = _bar() if is_live else None
        self._lines = lines and not quiet and not is_live

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
            self._bar.add_task("starting", total=None, told="")
        return self

    def __exit__(self, *error: object) -> None:
        """Take the bar away and show the cursor again."""
        if self._bar:
            self._bar.stop()

    def begin(self, title: str, total: int | None = None, done: int = 0) -> None:
        """Begin a new bar of `total` steps, or of unknown length, or print the title."""
        if self._bar:
            self._bar.remove_task(self._bar.task_ids[-1])
            self._bar.add_task(title, total=total, completed=done, told="")
        self.log(title)

    def update(
        self, done: int, told: str, title: str | None = None, total: int | None = None
    ) -> None:
        """Move the bar to `done` steps and show the numbers beside it."""
        if self._bar:
            task = self._bar.task_ids[-1]
            self._bar.update(task, completed=done, told=told, description=title, total=total)

    def log(self, line: str) -> None:
        """Print a line where there is no bar, which shows the same."""
        if self._lines:
            print(line, file=sys.stderr, flush=True)

    def keep(self, line: str, style: str | None = None) -> None:
        """Print an outcome, which stays in sight."""
        if self._bar:
            self._bar.console.print(line, style=style, markup=False, highlight=False)
        self.log(f"  {line}")


def _bar() -> Bar:
    console = Console(stderr=True)
    # Long schemes are cut so that the numbers beside them stay in sight.
    title = Column(no_wrap=True, max_width=max(console.width - 64, 16))
    return Bar(
        TextColumn("{task.description}", table_column=title, markup=False),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[told]}", style="cyan", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        transient=True,
    )
