"""The picture of a comparison: how accuracy grew, and bytes per step, one colour for each scheme.

The rows of the second panel name the lines of the first, so there is no legend to look things up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparsewire.report import human_bytes

from ..bench import drawing
from ..bench.colours import INK, MARKERS, OF_LINES
from .recorder import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = tuple[Result, str, str]
"""A scheme with its colour and its marker."""


def save(results: Sequence[Result], path: Path, rate: str | None = None) -> None:
    """Draw `results` and write them as PNG: over time if links had a `rate`, else over epochs."""
    rows = [
        (result, OF_LINES[number % len(OF_LINES)], MARKERS[number % len(MARKERS)])
        for number, result in enumerate(results)
    ]
    figure = drawing.blank(12, 5)
    learning, traffic = figure.subplots(1, 2)
    _draw_learning(learning, rows, rate)
    _draw_traffic(traffic, rows)
    drawing.write(figure, path)


def _draw_learning(axes: Axes, rows: Sequence[Row], rate: str | None) -> None:
    """Accuracy over seconds or epochs."""
    for result, colour, marker in rows:
        places = result.times if rate else range(1, len(result.epochs) + 1)
        heights = [100 * accuracy for accuracy in result.accuracies]
        axes.plot(places, heights, color=colour, marker=marker, markersize=5, alpha=0.9)
    if rate:
        axes.set_xlim(left=0)
        drawing.plain(axes, f"Test accuracy, %, with links of {rate}", "seconds of training")
    else:
        axes.set_xticks(range(1, max(len(result.epochs) for result, *_ in rows) + 1))
        drawing.plain(axes, "Test accuracy, %", "epoch")
    axes.grid(visible=False, axis="x")


def _draw_traffic(axes: Axes, rows: Sequence[Row]) -> None:
    """Bytes that a worker sends per step, on a logarithmic scale, the first scheme on top."""
    sent = [max(result.summary["bytes_per_step"], 1.0) for result, *_ in rows]
    lowest, highest = math.floor(math.log10(min(sent))), math.ceil(math.log10(max(sent)))
    for height, ((result, colour, marker), amount) in enumerate(zip(rows, sent, strict=True)):
        reduction = result.summary["reduction"]
        told = f"{human_bytes(amount)}   {reduction:.0f}× less"
        axes.plot([10**lowest, amount], [height, height], color=colour, alpha=0.35, linewidth=2)
        axes.plot(amount, height, color=colour, marker=marker, markersize=7)
        axes.annotate(
            told if reduction > 1.5 else human_bytes(amount),
            xy=(amount, height),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=9,
        )
    axes.set_xscale("log")
    # Room to the right of the largest for the numbers beside it.
    axes.set_xlim(10**lowest, 10 ** (highest + 0.45 * (highest - lowest + 1)))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    decades = [10**power for power in range(lowest, highest + 1) if 10**power <= max(sent)]
    axes.set_xticks(decades, [human_bytes(decade).replace(".0", "") for decade in decades])
    axes.minorticks_off()
    names = [result.name.replace("), ", "),\n", 1) for result, *_ in rows]
    ends = [f"{result.accuracies[-1]:.2%}" for result, *_ in rows]
    axes.set_yticks(range(len(rows)), map("\n".join, zip(names, ends, strict=True)))
    drawing.plain(axes, "Sent per step and worker", "log scale")
    axes.grid(visible=False, axis="y")
    for label, (_, colour, _) in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(colour)
