"""The columns of `bench scale`: measurements beside the model, and the model alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsewire.report import human_bytes

from ..contenders import COMPUTE
from ..results import Contender
from ..table import Column, Table
from ..words import say_seconds
from .view import Checked, Scale


@dataclass(frozen=True)
class Row:
    """One contender on one number of hosts; compute alone has nothing to check."""

    hosts: int
    one: Contender
    check: Checked | None


MEASURED: tuple[Column[Row], ...] = (
    Column("hosts", "hosts", "", "The number of hosts.", lambda row: row.hosts),
    Column(
        "received",
        "received",
        "bytes",
        "Bytes of messages that a host receives in a step, as many as it sends.",
        lambda row: row.one.payload if row.check else None,
        human_bytes,
    ),
    Column(
        "measured",
        "measured",
        "seconds",
        "The median step over all rounds.",
        lambda row: row.one.median,
        say_seconds,
    ),
    Column(
        "modelled",
        "model",
        "seconds",
        "Compute alone, measured with as many hosts, and the fitted cost of the exchange.",
        lambda row: row.check and row.check.modelled,
        say_seconds,
    ),
    Column(
        "error",
        "error",
        "share",
        "How far the model is off, relative to the measured step.",
        lambda row: row.check and row.check.error,
        "{:+.0%}".format,
    ),
)


def tables(scale: Scale) -> tuple[Table, Table, Table]:
    """Return the tables of measurements, of modelled step times, and of bytes received."""
    model = scale.results.model
    title = (
        f"{model['name']}, {model['parameters'] / 1e6:.1f} million parameters, "
        f"{scale.runs[0].place}: a step, measured and modelled"
    )
    checks = {(one.name, one.hosts): one for one in scale.checked}
    rows = [
        (name, Row(hosts, one, checks.get((name, hosts))))
        for name in (COMPUTE, *scale.names)
        for hosts, one in scale.measured(name).items()
    ]
    few = [n for n in scale.doublings[:-1] if n in (2, 8, 32, 128, 512)] + [scale.most]
    seconds = "Modelled, not measured: a step on hosts with cores of their own"
    received = "Received per host and step, by formula"
    return (
        Table(title, MEASURED, rows),
        _by_hosts(seconds, few, scale, scale.modelled, lambda value: f"~{say_seconds(value)}"),
        _by_hosts(received, few, scale, scale.received, human_bytes),
    )


def _by_hosts(title: str, few: list[int], scale: Scale, value: Any, show: Any) -> Table:
    """Return a table with a column for each of a few numbers of hosts."""

    def column(hosts: int) -> Column[str]:
        return Column(f"{hosts}", f"{hosts} hosts", "", "", lambda name: value(name, hosts), show)

    columns = [column(hosts) for hosts in few]
    return Table(title, columns, [(name, name) for name in scale.names])
