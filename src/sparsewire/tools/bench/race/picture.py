"""The picture of a race: the score over the seconds of training, with the target as a line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .. import drawing
from ..colours import INK, MARKERS, OF_LINES
from ..results import say_seconds
from .results import Race

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(race: Race, *paths: Path) -> None:
    """Draw `race` and write it in the formats that the names of `paths` end in."""
    drawing.write(draw(race), *paths)


def draw(race: Race) -> Figure:
    """One line for each contender; a ring marks where it got there."""
    goal, target = race.goal, race.goal.height(race.target)
    figure = drawing.blank(10, 5)
    axes = figure.subplots()
    for number, one in enumerate(race.runners):
        colour, marker = OF_LINES[number % len(OF_LINES)], MARKERS[number % len(MARKERS)]
        seconds = [point.seconds for point in one.points]
        heights = [goal.height(point.score) for point in one.points]
        there = race.got_there(one)
        told = say_seconds(one.last.seconds) if there else "failed" if one.failed else "never"
        axes.plot(
            seconds,
            heights,
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1.6,
            label=f"{one.name}: {told}",
        )
        if there:
            axes.plot(
                seconds[-1], heights[-1], "o", markersize=12, markerfacecolor="none", color=colour
            )
    axes.axhline(target, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.annotate(
        f"target {target:.4g}",
        (0, target),
        (5, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color=INK,
        fontsize=9,
    )
    # The beginning is steep and the same for all: what matters lies near the target.
    ends = [goal.height(one.last.score) for one in race.runners]
    if goal.is_loss:
        axes.set_ylim(0.95 * target, max(1.5 * target, *(1.02 * end for end in ends)))
    else:
        lowest = min(target - 20, *(end - 2 for end in ends))
        axes.set_ylim(max(0.0, lowest), min(100.5, target + 3))
    axes.set_xlim(left=0)
    drawing.plain(
        axes,
        f"{goal.task[0].upper()}{goal.task[1:]}, {race.hosts} hosts {race.place}: {goal.axis}",
        "seconds of training, without evaluation",
    )
    place = "upper right" if goal.is_loss else "lower right"
    axes.legend(loc=place, frameon=False, labelcolor=INK, fontsize=9)  # type: ignore[call-overload]
    return figure
