"""The picture of a race: test accuracy over the seconds of training, with the target as a line."""

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
    figure = drawing.blank(10, 5)
    axes = figure.subplots()
    for number, one in enumerate(race.runners):
        colour, marker = OF_LINES[number % len(OF_LINES)], MARKERS[number % len(MARKERS)]
        seconds = [point.seconds for point in one.points]
        heights = [100 * point.accuracy for point in one.points]
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
    axes.axhline(100 * race.target, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.annotate(
        f"target {100 * race.target:.4g} %",
        (0, 100 * race.target),
        (5, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color=INK,
        fontsize=9,
    )
    # The beginning is steep and the same for all: what matters lies below the target.
    lowest = min(100 * race.target - 20, *(100 * one.last.accuracy - 2 for one in race.runners))
    axes.set_ylim(max(0.0, lowest), min(100.5, 100 * race.target + 3))
    axes.set_xlim(left=0)
    drawing.plain(
        axes,
        f"MNIST, {race.hosts} hosts {race.place}: test accuracy, %",
        "seconds of training, without evaluation",
    )
    axes.legend(loc="lower right", frameon=False, labelcolor=INK, fontsize=9)
    return figure
