"""The tables of a measurement over sizes: the model beside what was measured, and alone."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.table import Table

from sparsewire.report import human_bytes

from ..contenders import COMPUTE
from ..results import say_seconds
from .results import Scale

MEASURED = ("hosts", "received", "measured", "model", "error")


def build(scale: Scale) -> tuple[Table, Table]:
    """What was measured, and what is modelled."""
    name, size = scale.model["name"], scale.model["parameters"] / 1e6
    title = f"{name}, {size:.1f} million parameters, {scale.place}: a step, measured and modelled"
    measured = _table(title)
    for heading in MEASURED:
        measured.add_column(heading, justify="right", no_wrap=True)
    for row in measured_rows(scale):
        measured.add_row(*row)
    modelled = _table("Modelled, not measured: a step on hosts with cores of their own")
    for heading in modelled_headings(scale):
        modelled.add_column(heading, justify="right", no_wrap=True)
    for row in modelled_rows(scale):
        modelled.add_row(*row)
    return measured, modelled


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=0, pad_edge=False)
    table.add_column("", style="bold", overflow="fold", max_width=36)
    return table


def measured_rows(scale: Scale) -> list[list[str]]:
    """By contender and number of hosts, compute alone first."""
    rows = [
        [COMPUTE if not number else "", str(hosts), "", say_seconds(run.floor.median), "", ""]
        for number, (hosts, run) in enumerate(scale.runs)
    ]
    for name in scale.names:
        checks = [one for one in scale.checked if one.name == name]
        for number, one in enumerate(checks):
            rows.append(
                [
                    "" if number else name,
                    str(one.hosts),
                    human_bytes(scale.measured(name)[one.hosts].payload),
                    say_seconds(one.measured),
                    say_seconds(one.modelled),
                    f"{one.error:+.0%}",
                ]
            )
    return rows


def modelled_headings(scale: Scale) -> list[str]:
    """Some numbers of hosts, few enough for a terminal."""
    return [f"{hosts} hosts" for hosts in _shown(scale)]


def modelled_rows(scale: Scale) -> list[list[str]]:
    """By contender, what a step takes on so many hosts, and what each of them receives."""
    rows = []
    for name in scale.names:
        hosts = _shown(scale)
        rows.append([name, *(f"~{say_seconds(scale.modelled(name, number))}" for number in hosts)])
        rows.append(["  received", *(human_bytes(scale.received(name, n)) for n in hosts)])
    return rows


def _shown(scale: Scale) -> list[int]:
    return [hosts for hosts in scale.doublings[:-1] if hosts in (2, 8, 32, 128, 512)] + [scale.most]
