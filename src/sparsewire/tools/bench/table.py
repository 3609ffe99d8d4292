"""The tables of a measurement for the terminal: what a step costs, and what it is made of."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.table import Table

from sparsewire.report import human_bytes

from .results import Contender, Results, Run
from .stopwatch import PARTS

COSTS = (
    "step,\nms",
    "\nquartiles",
    "times\ndense",
    "times\ncompute",
    "examples\nper s",
    "\nsent",
    "hidden",
)
_SHORTER = {"optimizer": "update"}  # to fit into 80 columns


def build(results: Results, run: Run) -> tuple[Table, Table]:
    """Two tables with a row for each contender."""
    name, size = results.model["name"], results.model["parameters"] / 1e6
    title = f"{name}, {size:.1f} million parameters, {results.hosts} hosts {run.place}"
    costs = _table(title, COSTS)
    parts = _table("Parts of the median step, ms", [_SHORTER.get(part, part) for part in PARTS])
    for one in run.finished:
        costs.add_row(one.name, *cost_cells(results, run, one))
        parts.add_row(one.name, *(milliseconds(one.parts[part]) for part in PARTS))
    for one in run.failed:
        costs.add_row(one.name, "failed", style="yellow")
    return costs, parts


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=0, pad_edge=False)
    table.add_column("", style="bold", overflow="fold", max_width=36)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def cost_cells(results: Results, run: Run, one: Contender) -> list[str]:
    """What stands under `COSTS`; empty where there is nothing to say."""
    examples = results.examples_per_second(one)
    low, high = one.quartiles
    return [
        milliseconds(one.median),
        f"{milliseconds(low)}–{milliseconds(high)}",
        "" if run.dense is None else f"{one.median / run.dense.median:.2f}",
        f"{one.median / run.floor.median:.2f}",
        "" if examples is None else f"{examples:,.0f}",
        "" if one.kind == "floor" else human_bytes(one.sent),
        "" if one.hidden is None else f"{one.hidden:.0%}",
    ]


def milliseconds(seconds: float) -> str:
    """A time without its unit, with as many digits as mean something; next to none as a dot."""
    value = 1000 * seconds
    if value < 0.05:
        return "·"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
