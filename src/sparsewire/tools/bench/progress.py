"""What people see while a measurement goes on: who is at work, how it goes, how long it will take.

All of it goes to standard error; standard output is for results.
"""

from __future__ import annotations

import statistics
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Column

from .results import say_seconds


def choose(quiet: bool, turns: int) -> Progress:
    """The display that fits: none if `quiet`, live only on a terminal."""
    if quiet:
        return Progress(turns)
    return Live(turns) if sys.stderr.isatty() else Lines(turns)


class Progress:
    """Follows a measurement of so many turns, and shows nothing of it."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.taken = 0
        self.place = ""
        self.contender = ""
        self.round = 0
        self._seconds: dict[str, list[float]] = {}  # that turns took, by contender
        self._began = 0.0

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
        """Something that is no turn is under way."""

    def begin(self, place: str) -> None:
        """A network is ready."""
        self.place = place

    def turn(self, number: int, contender: str) -> None:
        """A turn begins."""
        self.round, self.contender = number, contender
        self._began = time.monotonic()

    def step(self, seconds: float) -> None:
        """A step is done, warm-up included."""

    def done(self) -> None:
        """The turn is done."""
        self._seconds.setdefault(self.contender, []).append(time.monotonic() - self._began)
        self.taken += 1

    def failed(self, contender: str, reason: str, missed: int) -> None:
        """A contender is out, with so many turns that it will not take."""
        self.turns -= missed

    @property
    def left(self) -> float | None:
        """Seconds to the end, guessed from the turns so far; None before there are enough."""
        if not self.taken:
            return None
        mean = sum(map(sum, self._seconds.values())) / self.taken
        return mean * (self.turns - self.taken)


class Lines(Progress):
    """One plain line for each turn, for logs and pipes."""

    def __init__(self, turns: int) -> None:
        super().__init__(turns)
        self._steps: list[float] = []

    def begin(self, place: str) -> None:
        """Say which network."""
        super().begin(place)
        self._print(place)

    def turn(self, number: int, contender: str) -> None:
        """Begin to collect."""
        super().turn(number, contender)
        self._steps = []

    def step(self, seconds: float) -> None:
        """Collect."""
        self._steps.append(seconds)

    def done(self) -> None:
        """Print a line."""
        super().done()
        self._print(
            f"  {self.taken}/{self.turns}  round {self.round + 1}  {self.contender}  "
            f"{say_seconds(statistics.median(self._steps))}/step{_estimate(self.left)}"
        )

    def failed(self, contender: str, reason: str, missed: int) -> None:
        """Print the reason."""
        super().failed(contender, reason, missed)
        self._print(f"  {contender} failed: {reason}")

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class Live(Progress):
    """A bar over all turns, with who is at work and the time of the last step beside it."""

    def __init__(self, turns: int) -> None:
        super().__init__(turns)
        console = Console(stderr=True)
        title = Column(no_wrap=True, max_width=max(console.width - 60, 16))
        self._bar = Bar(
            TextColumn("{task.description}", table_column=title, markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[told]}", style="cyan", table_column=Column(no_wrap=True)),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=turns, told="")

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
        """Show it in place of a contender."""
        self._bar.update(self._task, description=doing, told="")

    def begin(self, place: str) -> None:
        """Show which network."""
        super().begin(place)
        self.say(f"{place}: starting")

    def turn(self, number: int, contender: str) -> None:
        """Show who."""
        super().turn(number, contender)
        self.say(f"{self.place}, round {number + 1}: {contender}")

    def step(self, seconds: float) -> None:
        """Show how long it took."""
        told = f"{say_seconds(seconds)}/step{_estimate(self.left)}"
        self._bar.update(self._task, told=told)

    def done(self) -> None:
        """Move the bar."""
        super().done()
        self._bar.update(self._task, completed=self.taken)

    def failed(self, contender: str, reason: str, missed: int) -> None:
        """Leave the reason above the bar."""
        super().failed(contender, reason, missed)
        self._bar.update(self._task, total=self.turns)
        self._bar.console.print(f"{contender} failed: {reason}", style="yellow", markup=False)


def _estimate(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 90:
        return f"  about {seconds:.0f} s left"
    return f"  about {seconds / 60:.0f} min left"
