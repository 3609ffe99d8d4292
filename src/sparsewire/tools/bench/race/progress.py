"""What people see while a race goes on: who trains, how far, how well, and how long it may take.

All of it goes to standard error; standard output is for results.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Column

from ..results import say_seconds
from .tasks import Goal


def choose(quiet: bool, limit_steps: int, goal: Goal) -> Progress:
    """The display that fits: none if `quiet`, live only on a terminal."""
    if quiet:
        return Progress(limit_steps, goal)
    return Live(limit_steps, goal) if sys.stderr.isatty() else Lines(limit_steps, goal)


class Progress:
    """Follows a race, and shows nothing of it."""

    def __init__(self, limit_steps: int, goal: Goal) -> None:
        self.limit_steps, self.goal = limit_steps, goal
        self.contender = ""
        self.score = 0.0
        self.step_number = 0
        self._began = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the terminal back."""

    def say(self, doing: str) -> None:
        """Something that is no step is under way."""

    def begin(self, contender: str, score: float) -> None:
        """A contender begins."""
        self.contender, self.score, self.step_number = contender, score, 0
        self._began = time.monotonic()

    def step(self, number: int, seconds: float) -> None:
        """A step is done, so many seconds on the clock."""
        self.step_number = number

    def point(self, score: float, seconds: float) -> None:
        """The test set was looked at."""
        self.score = score

    def done(self, contender: str, outcome: str) -> None:
        """A contender is through."""

    @property
    def left(self) -> str:
        """How long this contender may still take, evaluation included; at first nothing."""
        if not self.step_number:
            return ""
        elapsed = time.monotonic() - self._began
        seconds = elapsed / self.step_number * (self.limit_steps - self.step_number)
        return (
            f"  at most {seconds / 60:.0f} min" if seconds >= 90 else f"  at most {seconds:.0f} s"
        )


class Lines(Progress):
    """One plain line for each look at the test set, for logs and pipes."""

    def say(self, doing: str) -> None:
        """Print it, unless it is said at every look."""
        if doing != "testing":
            self._print(doing)

    def begin(self, contender: str, score: float) -> None:
        """Print who."""
        super().begin(contender, score)
        self._print(contender)

    def point(self, score: float, seconds: float) -> None:
        """Print a line."""
        super().point(score, seconds)
        self._print(
            f"  step {self.step_number}  {self.goal.shown(score)}  {say_seconds(seconds)}"
            f"{self.left}"
        )

    def done(self, contender: str, outcome: str) -> None:
        """Print the outcome."""
        self._print(f"  {contender}: {outcome}")

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class Live(Progress):
    """A bar over the steps of one contender, with score, clock and estimate beside it."""

    def __init__(self, limit_steps: int, goal: Goal) -> None:
        super().__init__(limit_steps, goal)
        console = Console(stderr=True)
        title = Column(no_wrap=True, max_width=max(console.width - 70, 16))
        self._bar = Bar(
            TextColumn("{task.description}", table_column=title, markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[told]}", style="cyan", table_column=Column(no_wrap=True)),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=limit_steps, told="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the bar away and show the cursor again."""
        self._bar.stop()

    def say(self, doing: str) -> None:
        """Show it beside the bar."""
        self._bar.update(self._task, told=doing)

    def begin(self, contender: str, score: float) -> None:
        """Show who, from the beginning."""
        super().begin(contender, score)
        self._bar.reset(self._task, description=contender, total=self.limit_steps, told="")

    def step(self, number: int, seconds: float) -> None:
        """Move the bar."""
        super().step(number, seconds)
        told = f"step {number}  {self.goal.shown(self.score)}  {say_seconds(seconds)}{self.left}"
        self._bar.update(self._task, completed=number, told=told)

    def done(self, contender: str, outcome: str) -> None:
        """Leave the outcome above the bar."""
        self._bar.console.print(f"{contender}: {outcome}", markup=False, highlight=False)
