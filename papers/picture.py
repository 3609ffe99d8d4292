"""The picture of a study: how score and loss went, a panel for each column of its table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from sparsewire.tools.bench import drawing
from sparsewire.tools.bench.colours import MARKERS, OF_LINES

from .recipe import ACCURACY, LOSS, Measure
from .store import Result
from .table import Board

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ACROSS = 4  # panels side by side
_LETTERS = 13  # of the legend that fit into an inch


Drawn = tuple[Measure, Measure]


def save(title: str, board: Board, *paths: Path, drawn: Drawn = (ACCURACY, LOSS)) -> None:
    """Draw `board` and write it in the formats that the names of `paths` end in."""
    drawing.write(draw(title, board, drawn), *paths)


def draw(title: str, board: Board, drawn: Drawn = (ACCURACY, LOSS)) -> Figure:
    """A line for each row, the mean over seeds, with their range shaded."""
    from matplotlib.ticker import LogLocator

    columns = [c for c in board.columns if any(board.results.get((r, c)) for r in board.rows)]
    across = min(_ACROSS, len(columns))
    bands = -(-len(columns) // across)
    figure = drawing.blank(3.6 * across + 1, 5.2 * bands + 1)
    figure.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold")
    panels = figure.subplots(2 * bands, across, squeeze=False, sharex=True)
    for number, column in enumerate(columns):
        band, place = divmod(number, across)
        for row, name in enumerate(board.rows):
            results = [r for r in board.results.get((name, column), ()) if not r["diverged"]]
            if results:
                for half, measure in enumerate(drawn):
                    _draw_line(panels[2 * band + half][place], results, measure, row, name)
        drawing.plain(panels[2 * band][place], f"{column}\n{drawn[0].name}", "")
        drawing.plain(panels[2 * band + 1][place], drawn[1].name, "epoch")
        panels[2 * band + 1][place].set_yscale("log", subs=())
        panels[2 * band + 1][place].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panels[2 * band + 1][place].yaxis.set_major_formatter("{x:g}")
    for spare in range(len(columns), bands * across):
        for half in range(2):
            panels[2 * (spare // across) + half][spare % across].set_visible(False)
    named = {line.get_label(): line for panel in panels.flat for line in panel.get_lines()}
    named = {name: named[name] for name in board.rows if name in named}
    widest = max(map(len, named), default=1)
    fitting = max(1, int(_LETTERS * figure.get_figwidth() / (widest + 8)))
    figure.legend(
        named.values(),
        named,
        loc="outside lower left",
        ncols=min(3, fitting),
        frameon=False,
        fontsize=9,
    )
    return figure


def _draw_line(
    axes: Axes, results: Sequence[Result], measure: Measure, row: int, name: str
) -> None:
    curves = zip(*(result["curves"][measure.field] for result in results), strict=False)
    points = [
        (epoch, [measure.unit * height for height in found])
        for epoch, found in zip(results[0]["curves"]["epoch"], curves, strict=False)
        if None not in found
    ]
    epochs, heights = [epoch for epoch, _ in points], [found for _, found in points]
    colour = OF_LINES[row % len(OF_LINES)]
    means = [fmean(points) for points in heights]
    marker = MARKERS[row % len(MARKERS)]
    (line,) = axes.plot(epochs, means, color=colour, marker=marker, markersize=3, linewidth=1.2)
    line.set(label=name, linestyle="-" if row < len(OF_LINES) else "--")  # no two look the same
    lowest, highest = [min(p) for p in heights], [max(p) for p in heights]
    axes.fill_between(epochs, lowest, highest, color=colour, alpha=0.12, linewidth=0)
