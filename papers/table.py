"""A study's results as a plain table: our scores with their spread, above the paper's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from sparsewire.report import human_bytes

from .recipe import ACCURACY, Cell, Measure, Place
from .store import Result, Store, is_doubted

MISSING = "·"
DOUBTED = "?"


class Board:
    """The results of a study's cells, by row and column."""

    def __init__(self, cells: Sequence[Cell], store: Store, score: Measure = ACCURACY) -> None:
        self.score = score
        self.cells: dict[Place, Cell] = {place: cell for cell in cells for place in cell.places}
        self.results: dict[Place, list[Result]] = {
            place: store.find_all(cell) for place, cell in self.cells.items()
        }
        self.published: dict[Place, float] = {
            place: number
            for cell in cells
            for place, number in zip(cell.places, cell.published, strict=False)
            if number is not None
        }

    @property
    def rows(self) -> list[str]:
        """The names of the rows from top to bottom."""
        return list(dict.fromkeys(row for row, _ in self.cells))

    @property
    def columns(self) -> list[str]:
        """The names of the columns from left to right."""
        return list(dict.fromkeys(column for _, column in self.cells))

    @property
    def scores(self) -> dict[Place, list[float]]:
        """The final scores of valid results. A diverged training without a score has 0."""
        believed = {
            place: [result for result in results if not is_doubted(result)]
            for place, results in self.results.items()
        }
        return {
            place: [self.score.unit * (result.get(self.score.field) or 0.0) for result in results]
            for place, results in believed.items()
            if results
        }


def render(board: Board) -> str:
    """Return the tables of scores and of bytes as text."""
    parts = [_scores(board)]
    results = [result for found in board.results.values() for result in found]
    if results:
        parts.append(_traffic(board))
    doubted = sorted({f"{r['cell']}: {r['flaw']}" for r in results if is_doubted(r)})
    if doubted:
        parts.append("\n".join([f"{DOUBTED} to be trained anew, a message was wrong:", *doubted]))
    return "\n\n".join(parts)


def _scores(board: Board) -> str:
    lines = [[board.score.name, *board.columns]]
    for row in board.rows:
        said = (_said(board.results.get((row, c)), board.score) for c in board.columns)
        lines.append([row, *said])
        theirs = [board.published.get((row, column)) for column in board.columns]
        if any(number is not None for number in theirs):
            lines.append(["  paper", *("" if n is None else f"{n:.2f}" for n in theirs)])
    return grid(lines)


def _said(results: Sequence[Result] | None, score: Measure) -> str:
    """Return the mean score; for several seeds, also half the range and the number of seeds."""
    if results is None:
        return ""
    if not results:
        return MISSING
    diverged = sum(result["diverged"] for result in results)
    if diverged == len(results):
        return "diverged"
    finals = [score.unit * result[score.field] for result in results if not result["diverged"]]
    text = f"{fmean(finals):.{score.digits}f}"
    if len(finals) > 1:
        text += f" ± {(max(finals) - min(finals)) / 2:.{score.digits}f}"
    text += f" ({diverged} diverged)" if diverged else ""
    return text + (DOUBTED if any(map(is_doubted, results)) else "")


def _traffic(board: Board) -> str:
    lines = [["sent / received per step and worker", *board.columns]]
    for row in board.rows:
        lines.append([row, *(_bytes(board.results.get((row, c))) for c in board.columns)])
    return grid(lines)


def _bytes(results: Sequence[Result] | None) -> str:
    if results is None:
        return ""
    if not results:
        return MISSING
    sent, received = results[0]["sent"], results[0]["received"]
    return (
        human_bytes(sent) if sent == received else f"{human_bytes(sent)} / {human_bytes(received)}"
    )


def grid(lines: Sequence[Sequence[str]]) -> str:
    """Return lines as aligned columns, the first one to the left and the others to the right.

    >>> print(grid([["", "a"], ["row", "10"]]))
          a
    row  10
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            text.ljust(width) if number == 0 else text.rjust(width)
            for number, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
