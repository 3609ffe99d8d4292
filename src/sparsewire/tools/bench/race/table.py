"""The table of a race: when each contender got there, and at what cost."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.table import Table

from sparsewire.report import human_bytes

from ..results import say_seconds
from .results import Race, Runner

HEADINGS = (
    "\ntime",
    "\nsteps",
    "time per\nstep",
    "\nsent",
    "examples\nper s",
    "against\ndense",
    "\nbest",
)


def build(race: Race) -> Table:
    """A row for each contender."""
    size = race.model["parameters"] / 1e6
    title = f"To {race.aim}: {size:.1f} million parameters, {race.hosts} hosts {race.place}"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=0, pad_edge=False)
    table.add_column("", style="bold", overflow="fold", max_width=36)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for one in race.runners:
        style = None if race.got_there(one) else "yellow"
        table.add_row(one.name, *cells(race, one), style=style)
    return table


def cells(race: Race, one: Runner) -> list[str]:
    """What stands under `HEADINGS`; empty where there is nothing to say."""
    there, last = race.got_there(one), one.last
    examples, dense = race.examples_per_second(one), race.dense
    against = ""
    if dense is not None and one is not dense and there and race.got_there(dense):
        against = one.timing.verdict(dense.timing)
    return [
        say_seconds(last.seconds) if there else "failed" if one.failed else "never",
        str(last.step) if there else f"> {last.step}" if last.step else "",
        say_seconds(last.seconds / last.step) if last.step else "",
        human_bytes(last.sent) if last.step else "",
        "" if examples is None else f"{examples:,.0f}",
        against,
        race.best(one),
    ]
