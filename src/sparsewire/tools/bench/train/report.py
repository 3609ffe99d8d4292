"""The report and the picture of `bench train`: the score over the seconds of training."""

from __future__ import annotations

from pathlib import Path

from sparsewire.report import human_bytes, plural

from .. import report
from ..drawing import write
from ..report import Block, Folded, Notes, Page, Section
from ..report.chart import Chart, Panel, Series, draw
from ..results import Contender, Results
from ..step.report import slow_links
from ..table import Table
from ..timing import RULE, conclusion, ties
from ..words import say_seconds
from .columns import Race, looks, table

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
    write(draw(chart(Race(results))), *paths)


def chart(race: Race) -> Chart:
    """Return a line for each contender; a ring marks where it reached the target."""
    goal, target = race.goal, race.goal.height(race.target)
    # The beginning is steep and the same for all; show the part near the target.
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


def headline(race: Race) -> str:
    """Return the main finding, in one sentence."""
    where, goal, dense = f"On {race.run.hosts} hosts {race.run.place}", race.aim, race.run.dense
    schemes = [one for one in race.arrived if one.kind == "scheme"]
    if not race.arrived:
        return f"{where}, nobody reached {goal} in {plural(race.limit_steps, 'step')}."
    if not schemes:
        one = race.arrived[0]
        took = say_seconds(one.last.seconds)
        return f"{where}, {one.name} reaches {goal} in {took}; no scheme does."
    best, *others = schemes
    rivals = {one.name: one.timing for one in others}
    said = f"{where}, {best.name} reaches {goal} in {say_seconds(best.last.seconds)}"
    if dense is not None and race.got_there(dense):
        found = conclusion(best.timing, dense.timing, rivals)
        return f"{said}, dense DDP in {say_seconds(dense.last.seconds)}: {found}."
    alone = "" if dense is None else "; dense DDP does not"
    return f"{said}{alone}{ties(best.timing, rivals)}."


def remarks(race: Race) -> list[str]:
    """Return everything else worth knowing, whoever it speaks for."""
    said, dense = [], race.run.dense
    for one in race.run.contenders:
        if one.failed:
            said.append(f"{one.name} failed: {one.failed}")
        elif not race.got_there(one):
            said.append(
                f"{one.name} did not get there in {plural(race.limit_steps, 'step')} and "
                f"{say_seconds(one.last.seconds)}: its best was {race.goal.shown(race.best(one))}."
            )
        elif dense is not None and one is not dense and race.got_there(dense):
            more = one.last.step - dense.last.step
            if more > 0:
                said.append(f"{one.name} needs {plural(more, 'step')} more than dense DDP.")
            if dense.timing.beats(one.timing):
                said.append(f"{one.name} gets there later than dense DDP.")
    return said + slow_links(race.run)
