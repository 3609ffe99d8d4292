"""The columns of `bench train`: every figure of its table and of `summary` in results.json.

Columns read a `Row`: the points of one contender's training. The points come from
`cli/race_rank.py`, which reads the clock and the counters of bytes at each test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsewire.report import human_bytes

from ..results import Contender, Point, Results, Run
from ..table import Column, Table, summary
from ..words import say_seconds
from .plan import GOALS, Goal


@dataclass(frozen=True)
class Race:
    """A training to a target with several contenders on one network."""

    results: Results

    @property
    def run(self) -> Run:
        """The trainings of all contenders."""
        return self.results.runs[0]

    @property
    def goal(self) -> Goal:
        """The meaning of scores."""
        return GOALS[self.results.model["name"]]

    @property
    def target(self) -> float:
        """The score that ends a training."""
        return float(self.results.facts["target"])

    @property
    def limit_steps(self) -> int:
        """The steps after which a training ends without the target."""
        return int(self.results.facts["limit_steps"])

    @property
    def aim(self) -> str:
        """The target in words."""
        return self.goal.aim(self.target)

    @property
    def arrived(self) -> list[Contender]:
        """The contenders that reached the target, the fastest first."""
        there = [one for one in self.run.contenders if self.got_there(one)]
        return sorted(there, key=lambda one: one.last.seconds)

    def got_there(self, one: Contender) -> bool:
        """Whether it reached the target."""
        return not one.failed and self.goal.reached(one.last.score, self.target)

    def best(self, one: Contender) -> float:
        """Return the best score that it had."""
        return self.goal.best([point.score for point in one.points])


@dataclass(frozen=True)
class Row:
    """One contender's training."""

    race: Race
    one: Contender

    @property
    def there(self) -> bool:
        """Whether it reached the target."""
        return self.race.got_there(self.one)


def _when_there(value: Any) -> Any:
    """Compute a value from the last point of a training that reached the target."""
    return lambda row: value(row.one.last) if row.there else None


def _per_step(value: Any) -> Any:
    return lambda row: value(row.one.last) if row.one.last.step else None


def _examples_per_second(row: Row) -> float | None:
    last, model = row.one.last, row.race.results.model
    return last.step * model["examples"] * row.race.run.hosts / last.seconds if last.step else None


def _speed_up(row: Row) -> float | None:
    dense = row.race.run.dense
    if dense is None or not row.there or not row.race.got_there(dense):
        return None
    return dense.last.seconds / row.one.last.seconds


def _against_dense(row: Row) -> str | None:
    dense = row.race.run.dense
    is_rival = dense is not None and row.one is not dense and _speed_up(row) is not None
    return row.one.timing.verdict(dense.timing) if dense is not None and is_rival else None


COLUMNS: tuple[Column[Row], ...] = (
    Column(
        "seconds_to_target",
        "time",
        "seconds",
        "Seconds of training steps up to the first evaluation that reached the target, on the "
        "slowest rank; evaluation not counted.",
        _when_there(lambda last: last.seconds),
        say_seconds,
        lambda row: "failed" if row.one.failed else "never",
    ),
    Column(
        "steps_to_target",
        "steps",
        "",
        "The steps taken until then.",
        _when_there(lambda last: last.step),
        str,
        lambda row: f"> {row.one.last.step}" if row.one.last.step else "",
    ),
    Column(
        "seconds_per_step",
        "time per\nstep",
        "seconds",
        "The seconds of training, divided by the steps taken.",
        _per_step(lambda last: last.seconds / last.step),
        say_seconds,
    ),
    Column(
        "bytes_sent",
        "sent",
        "bytes",
        "Bytes that left one host during the training; over loopback, those of the messages.",
        _per_step(lambda last: last.sent),
        human_bytes,
    ),
    Column(
        "examples_per_second",
        "examples\nper s",
        "examples per second",
        "Examples that all hosts together trained on, divided by the seconds of training.",
        _examples_per_second,
        "{:,.0f}".format,
    ),
    Column(
        "against_dense",
        "against\ndense",
        "",
        "Its time to the target beside that of dense DDP; unclear if they cannot be told apart.",
        _against_dense,
    ),
    Column(
        "reached",
        "",
        "",
        "Whether the target was reached.",
        lambda row: row.there,
    ),
    Column(
        "bytes_to_target",
        "",
        "bytes",
        "Bytes that left one host up to the target; null without it.",
        _when_there(lambda last: last.sent),
    ),
    Column(
        "speed_up",
        "",
        "",
        "Dense DDP's time to the target, divided by this one; null unless both reached it.",
        _speed_up,
    ),
)
"""The time, steps and bytes of each contender up to the target."""


def best_score(goal: Goal) -> Column[Row]:
    """Return the last column, which formats scores as the goal does."""
    about = "The best score of all evaluations."
    return Column("best_score", "best", "", about, lambda row: row.race.best(row.one), goal.shown)


def columns(race: Race) -> tuple[Column[Row], ...]:
    """Return all columns."""
    return (*COLUMNS, best_score(race.goal))


def table(race: Race) -> Table:
    """Return a line for each contender."""
    size, run = race.results.model["parameters"] / 1e6, race.run
    title = f"To {race.aim}: {size:.1f} million parameters, {run.hosts} hosts {run.place}"
    return Table(title, columns(race), [(one.name, Row(race, one)) for one in run.contenders])


def looks(race: Race) -> Table:
    """Return a line for each evaluation."""
    goal = race.goal
    columns: tuple[Column[Point], ...] = (
        Column("step", "step", "", "", lambda point: point.step),
        Column("seconds", "seconds", "", "", lambda point: point.seconds, "{:.1f}".format),
        Column("score", goal.score, "", "", lambda point: point.score, goal.shown),
    )
    return Table("", columns, [(one.name, p) for one in race.run.contenders for p in one.points])


def summarize(results: Results, run: Run, one: Contender) -> dict[str, Any]:
    """Return a contender's `summary` for results.json."""
    race = Race(results)
    return summary(columns(race), Row(race, one))
