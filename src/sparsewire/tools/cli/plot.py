"""The picture of a comparison: how accuracy grew, and bytes per step, one colour a scheme.

Lines and rows carry their names themselves, so there is no legend to look things up in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from sparsewire.report import human_bytes

from .recorder import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart by all common kinds of colour vision.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B87E00", "#56B4E9")
_MARKERS = "osD^vPX"
_INK, _FAINT = "#333333", "#e4e4e4"
_LINE = 0.056  # height of one line of a label, as a share of the axes


@dataclass(frozen=True)
class _Row:
    """One scheme as it is drawn."""

    result: Result
    colour: str
    marker: str

    @property
    def name(self) -> str:
        """The scheme, a long one on two lines."""
        return self.result.name.replace("), ", "),\n", 1)


def save(results: Sequence[Result], path: Path, rate: str | None = None) -> None:
    """Draw `results` and write them as PNG: over time if links had a `rate`, else over epochs."""
    from matplotlib.figure import Figure  # takes 0.6 s, and only a comparison needs it

    rows = [
        _Row(result, _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)])
        for number, result in enumerate(results)
    ]
    figure = Figure(figsize=(12, 5), dpi=150)
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12)
    learning, traffic = figure.subplots(1, 2, width_ratios=(5, 4))
    for axes in (learning, traffic):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(_FAINT)
        axes.tick_params(which="both", colors=_INK, length=0, labelsize=9)
        axes.set_axisbelow(True)
    _draw_learning(learning, rows, rate)
    _draw_traffic(traffic, rows)
    figure.savefig(path)


def _draw_learning(axes: Axes, rows: Sequence[_Row], rate: str | None) -> None:
    """Accuracy over seconds or epochs, each line named at its end."""
    places = {row.name: row.result.times for row in rows}
    title, unit = f"Test accuracy, %, over seconds of training at {rate}", "seconds"
    if rate is None:
        places = {row.name: list(range(1, len(row.result.epochs) + 1)) for row in rows}
        axes.set_xticks(range(1, max(map(len, places.values())) + 1))
        title, unit = "Test accuracy, %", "epoch"
    for row in rows:
        heights = [100 * accuracy for accuracy in row.result.accuracies]
        axes.plot(
            places[row.name],
            heights,
            color=row.colour,
            marker=row.marker,
            markersize=5,
            alpha=0.9,
        )
    if rate is not None:
        axes.set_xlim(left=0)
    axes.set_xlabel(unit, color=_INK)
    axes.set_title(title, loc="left", color=_INK, fontweight="bold", pad=14)
    axes.grid(axis="y", color=_FAINT)
    low, high = axes.get_ylim()
    ends = [100 * row.result.accuracies[-1] for row in rows]
    heights = [_LINE * (1 + row.name.count("\n")) for row in rows]
    spots = _spread([(end - low) / (high - low) for end in ends], heights)
    for row, end, place in zip(rows, ends, spots, strict=True):
        axes.annotate(
            f"{end:.2f}  {row.name}".replace("\n", "\n            "),
            xy=(places[row.name][-1], end),
            xytext=(1.03, place),
            textcoords="axes fraction",
            va="center",
            color=row.colour,
            fontsize=9,
            arrowprops={
                "arrowstyle": "-",
                "color": row.colour,
                "alpha": 0.4,
                "linewidth": 0.8,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 4,
            },
        )


def _draw_traffic(axes: Axes, rows: Sequence[_Row]) -> None:
    """Bytes that a worker sends per step, on a logarithmic scale, the first scheme on top."""
    sent = [max(row.result.summary["bytes_per_step"], 1.0) for row in rows]
    lowest, highest = math.floor(math.log10(min(sent))), math.ceil(math.log10(max(sent)))
    axes.set_xscale("log")
    # Room to the right of the largest for the numbers beside it.
    axes.set_xlim(10**lowest, 10 ** (highest + 0.45 * (highest - lowest + 1)))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    for height, (row, amount) in enumerate(zip(rows, sent, strict=True)):
        reduction = row.result.summary["reduction"]
        told = f"{human_bytes(amount)}   {reduction:.0f}× less"
        axes.plot([10**lowest, amount], [height, height], color=row.colour, alpha=0.35, linewidth=2)
        axes.plot(amount, height, color=row.colour, marker=row.marker, markersize=7)
        axes.annotate(
            told if reduction > 1.5 else human_bytes(amount),
            xy=(amount, height),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            color=_INK,
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    decades = [10**power for power in range(lowest, highest + 1) if 10**power <= max(sent)]
    axes.set_xticks(decades, [human_bytes(decade).replace(".0", "") for decade in decades])
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(row.colour)
    axes.set_title(
        "Sent per step and worker, log scale", loc="left", color=_INK, fontweight="bold", pad=14
    )
    axes.grid(axis="x", color=_FAINT)


def _spread(places: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Move labels of these heights off each other in small steps, and keep them below the top."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = list(places)
    for _ in range(500):
        moved = [min(place, 1 - height / 2) for place, height in zip(moved, heights, strict=True)]
        for lower, upper in pairwise(order):
            lacking = (heights[lower] + heights[upper]) / 2 - (moved[upper] - moved[lower])
            if lacking > 0:
                moved[lower] -= lacking / 2
                moved[upper] += lacking / 2
    return moved
