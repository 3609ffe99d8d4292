"""The picture of a study: score and loss over the epochs, or the score against the bytes sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from sparsewire.report import human_bytes
from sparsewire.tools.bench import drawing
from sparsewire.tools.bench.drawing import FAINT, INK, MARKERS, OF_LINES

from .recipe import ACCURACY, LOSS, Measure, at_their_best
from .store import Result
from .table import Board

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ACROSS = 4  # panels per row
_LETTERS = 13  # letters of the legend per inch


Drawn = tuple[Measure, Measure]


def save(title: str, board: Board, *paths: Path, drawn: Drawn = (ACCURACY, LOSS)) -> None:
    """Draw `board` and write it to `paths`, in the formats of their suffixes."""
    drawing.write(draw(title, board, drawn), *paths)


def draw(title: str, board: Board, drawn: Drawn = (ACCURACY, LOSS)) -> Figure:
    """Draw a line for each row: the mean over seeds, with the range shaded."""
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
    line.set(label=name, linestyle="-" if row < len(OF_LINES) else "--")  # since colours repeat
    lowest, highest = [min(p) for p in heights], [max(p) for p in heights]
    axes.fill_between(epochs, lowest, highest, color=colour, alpha=0.12, linewidth=0)


@dataclass(frozen=True)
class _Mark:
    """A point of the picture: a row in its best column."""

    name: str
    sent: float  # per step and worker
    scores: tuple[float, ...]

    @property
    def kind(self) -> str:
        """The kind of exchange, which chooses the colour."""
        return "local steps" if "H = " in self.name else self.name.split()[0]

    @property
    def score(self) -> float:
        return fmean(self.scores)

    @property
    def error(self) -> float:
        """The standard error of the mean; 0 for one seed."""
        several = len(self.scores) > 1
        return stdev(self.scores) / math.sqrt(len(self.scores)) if several else 0.0


def save_against_bytes(title: str, board: Board, *paths: Path) -> None:
    """Draw the score of every row against its bytes, and write it to `paths`."""
    drawing.write(draw_against_bytes(title, board), *paths)


def draw_against_bytes(title: str, board: Board) -> Figure:
    """Draw a point for each row in its best column.

    Points that another beats are faint, and only the others have a name and an error bar. If all
    points of a kind are beaten, its best one has them.
    """
    marks, sign = _marks(board), -1 if board.score.is_loss else 1
    figure = drawing.blank(10, 6)
    axes = figure.subplots()
    best = max(marks, key=lambda mark: sign * mark.score)
    worst = max(sign * (best.score - mark.score) for mark in marks)
    span = min(_SHOWN * abs(best.score), 1.1 * worst)  # worse points are drawn on the edge
    edge = best.score - sign * span
    sent = [mark.sent for mark in marks]
    middle = math.sqrt(max(1.0, min(sent)) * max(1.0, *sent))
    kinds = list(dict.fromkeys(mark.kind for mark in marks))
    styles = {
        kind: (OF_LINES[number % len(OF_LINES)], MARKERS[number % len(MARKERS)])
        for number, kind in enumerate(kinds)
    }
    named = [mark for mark in marks if not _is_beaten(mark, marks, sign)]
    for kind in set(kinds) - {mark.kind for mark in named}:
        family = (mark for mark in marks if mark.kind == kind)
        named.append(max(family, key=lambda mark: sign * mark.score))
    for mark in marks:
        colour, shape = styles[mark.kind]
        height = edge if sign * mark.score < sign * edge else mark.score
        is_named = mark in named
        has_error = is_named and height == mark.score and mark.error > 0
        axes.errorbar(
            mark.sent,
            height,
            mark.error if has_error else None,
            fmt=shape,
            color=colour,
            alpha=1.0 if is_named else 0.25,
            markersize=7 if is_named else 5,
            capsize=3,
        )
        if is_named:
            is_left = mark.sent < middle
            axes.annotate(
                f"{mark.name}: {mark.score:.{board.score.digits}f}",
                (mark.sent, height),
                (9 if is_left else -9, 5),
                textcoords="offset points",
                fontsize=8,
                color=INK,
                ha="left" if is_left else "right",
            )
    axes.axhline(best.score, color=FAINT, linewidth=0.9)
    axes.set_xscale("log")
    axes.set_ylim(*sorted((edge - sign * 0.05 * span, best.score + sign * 0.12 * span)))
    for name, (colour, shape) in styles.items():
        axes.plot([], [], shape, color=colour, label=name)
    drawing.plain(axes, f"{title}: {board.score.name}", "sent per step and worker")
    axes.xaxis.set_major_formatter(lambda sent, _: human_bytes(sent))
    axes.margins(x=0.12)
    corner = "upper right" if board.score.is_loss else "lower right"
    axes.legend(loc=corner, frameon=False, labelcolor=INK, fontsize=9)  # type: ignore[call-overload]
    return figure


def _is_beaten(mark: _Mark, marks: Sequence[_Mark], sign: int) -> bool:
    """Return whether another row is better for as many bytes, or nearly as good for far fewer."""
    return any(
        sign * (other.score - mark.score) > 0
        if mark.sent < _FEWER * other.sent
        else sign * (other.score - mark.score) > -max(mark.error, other.error)
        for other in marks
        if other is not mark and other.sent <= _EQUAL * mark.sent
    )


_SHOWN = 0.15  # range of the picture / best score
_EQUAL, _FEWER = 1.05, 1.3  # ratios of bytes that count as equal, and as far fewer


def _marks(board: Board) -> list[_Mark]:
    best = at_their_best(board.scores, board.score)
    return [
        _Mark(row, board.results[row, column][0]["sent"], tuple(scores))
        for row, (column, scores) in best.items()
    ]
