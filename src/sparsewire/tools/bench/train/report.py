"""The report and the picture of `bench train`: the score over the seconds of training."""

from __future__ import annotations

from pathlib import Path

from sparsewire.report import human_bytes, plural

from .. import report
from ..report import Block, Folded, Notes, Page, Section
from ..report.chart import Chart, Panel, Series
from ..report.chart import save as save_chart
from ..results import Contender, Results
from ..table import Table
from ..timing import RULE
from ..words import say_seconds
from .columns import Race, looks, table
from .findings import headline, remarks

_METHOD = (
    "Every contender trains from the same initial weights on the same batches in the same order, "
    "one after the other, on the same network.",
    "The clock counts training steps only, on the slowest rank. It stops while processes start, "
    "while a contender sets itself up, and during evaluation.",
    "The test set is the same for all and is shared out over the hosts. The time to the target is "
    "that of the first evaluation that reached it, so its resolution is the steps between two "
    "evaluations. Its spread covers all of them, at the quartiles of the time per step.",
    RULE,
    "The learning rate is the same for all and was chosen so that dense DDP gets there soon; no "
    "contender has one of its own.",
)


def page(results: Results) -> Page:
    """Return the report."""
    race = Race(results)
    model, goal = results.model, race.goal
    blocks: tuple[Block, ...] = (
        chart(race),
        table(race),
        Notes(tuple(remarks(race))),
        Folded("Every evaluation", looks(race)),
        *report.links(race.run.links),
    )
    return Page(
        f"To {race.aim} on {race.run.hosts} hosts",
        results.setting,
        headline(race),
        f"A {goal.network} with {plural(model['parameters'], 'parameter')} in "
        f"{plural(model['tensors'], 'tensor')}, {plural(model['examples'], goal.example)} per host "
        f"and step.",
        (Section(f"{goal.score.capitalize()} over time", blocks),),
        (*_METHOD, *report.shared_cores(results.setting, race.run.hosts)),
    )


def shown(results: Results) -> list[Table | str]:
    """Return what the terminal shows."""
    race = Race(results)
    return [table(race), headline(race), *remarks(race)]


def save_picture(results: Results, *paths: Path) -> None:
    """Draw the curves, in the formats that the names of `paths` end in."""
    save_chart(chart(Race(results)), *paths)


def chart(race: Race) -> Chart:
    """Return a line for each contender; a ring marks where it reached the target."""
    goal, target = race.goal, race.goal.height(race.target)
    # The beginning is steep and the same for all: what matters lies near the target.
    ends = [goal.height(one.last.score) for one in race.run.contenders]
    heights = (
        (0.95 * target, max(1.5 * target, *(1.02 * end for end in ends)))
        if goal.is_loss
        else (max(0.0, min(target - 20, *(end - 2 for end in ends))), min(100.5, target + 3))
    )
    panel = Panel(
        f"{goal.task[0].upper()}{goal.task[1:]}, {race.run.hosts} hosts {race.run.place}: "
        f"{goal.axis}",
        "seconds of training, without evaluation",
        tuple(_line(race, number, one) for number, one in enumerate(race.run.contenders)),
        heights,
        (target, f"target {target:.4g}"),
    )
    return Chart(headline(race), (panel,))


def _line(race: Race, number: int, one: Contender) -> Series:
    there = race.got_there(one)
    outcome = say_seconds(one.last.seconds) if there else "failed" if one.failed else "never"
    return Series(
        one.name,
        number,
        [point.seconds for point in one.points],
        [race.goal.height(point.score) for point in one.points],
        [
            f"{one.name}\nstep {point.step}, {say_seconds(point.seconds)}: "
            f"{race.goal.shown(point.score)}\n{human_bytes(point.sent)} sent per host"
            for point in one.points
        ],
        ends_in_ring=there,
        told_in_legend=f"{one.name}: {outcome}",
    )
