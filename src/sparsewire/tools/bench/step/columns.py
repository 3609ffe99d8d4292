"""The columns of `bench step`: every figure of its tables and of `summary` in results.json.

Each `Column` has its name, its unit, how it is computed and how it is shown. Columns read a `Row`:
a contender's samples, on one network. The samples come from `rank.py`, which reads the clock and
the counters of bytes; `stopwatch.py` splits the time of a step into its parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsewire.report import human_bytes

from ..results import Contender, Results, Run
from ..table import Column, Table, summary
from ..words import milliseconds


@dataclass(frozen=True)
class Row:
    """One contender on one network."""

    results: Results
    run: Run
    one: Contender


def _times_dense(row: Row) -> float | None:
    return row.one.median / row.run.dense.median if row.run.dense else None


def _examples_per_second(row: Row) -> float | None:
    examples = row.results.model["examples"]
    return examples * row.run.hosts / row.one.median if examples else None


def _share(value: float) -> str:
    return f"{value:.0%}"


COSTS: tuple[Column[Row], ...] = (
    Column(
        "median",
        "step,\nms",
        "seconds",
        "The median over all steps of all rounds. The time of one step is the mean over the ranks.",
        lambda row: row.one.median,
        milliseconds,
    ),
    Column(
        "quartiles",
        "quartiles",
        "seconds",
        "Half of the steps took a time between these two; with fewer than four steps, all of them.",
        lambda row: [row.one.timing.low, row.one.timing.high],
        lambda both: "–".join(map(milliseconds, both)),
    ),
    Column(
        "times_dense",
        "times\ndense",
        "",
        "The median step, divided by that of dense DDP on the same network.",
        _times_dense,
        "{:.2f}".format,
    ),
    Column(
        "times_compute",
        "times\ncompute",
        "",
        "The median step, divided by that of compute alone.",
        lambda row: row.one.median / row.run.floor.median,
        "{:.2f}".format,
    ),
    Column(
        "examples_per_second",
        "examples\nper s",
        "examples per second",
        "The examples in a batch, times the number of hosts, divided by the median step.",
        _examples_per_second,
        "{:,.0f}".format,
    ),
    Column(
        "sent_per_step",
        "sent",
        "bytes",
        "Bytes that leave one host in a step: wire_per_step on a lab, payload_per_step elsewhere.",
        lambda row: None if row.one.kind == "floor" else row.one.sent,
        human_bytes,
    ),
    Column(
        "exchange_hidden",
        "hidden",
        "share",
        "The share of the exchange that ran during backward.",
        lambda row: row.one.hidden,
        _share,
    ),
    Column(
        "payload_per_step",
        "",
        "bytes",
        "Bytes of the messages that a rank sends, the mean over all steps; for a peer, those of a "
        "ring of all ranks.",
        lambda row: row.one.payload,
    ),
    Column(
        "wire_per_step",
        "",
        "bytes",
        "Bytes that left a host's network interface, headers included, the median over all steps; "
        "null over loopback.",
        lambda row: row.one.wire,
    ),
)
"""The columns of the cost of a step."""

_PARTS = {
    "forward": "From the start of the step to the loss, including loading the batch.",
    "backward": "Until the last gradient is computed; exchanges run at the same time.",
    "select": "Selecting coordinates, as far as not hidden behind backward.",
    "encode": "Encoding messages, as far as not hidden behind backward.",
    "exchange": "Moving bytes and waiting for other ranks, as far as not hidden behind backward.",
    "decode": "Decoding and summing messages, as far as not hidden behind backward.",
    "wait": "No stage is running, and backward() has not returned.",
    "optimizer": "The update of the weights.",
}


def _part(name: str, about: str) -> Column[Row]:
    title = {"optimizer": "update"}.get(name, name)  # to fit into 80 columns
    return Column(name, title, "seconds", about, lambda row: row.one.parts[name], milliseconds)


PARTS = tuple(_part(name, about) for name, about in _PARTS.items())
"""The columns of the parts of the median step: those of the mean step, scaled to the median."""


def tables(results: Results, run: Run) -> tuple[Table, Table]:
    """Return the tables of the cost and of the parts of a step, with a line for each contender."""
    model = results.model
    title = f"{model['name']}, {model['parameters'] / 1e6:.1f} million parameters, "
    rows = [(one.name, Row(results, run, one)) for one in run.finished]
    failed = [one.name for one in run.failed]
    return (
        Table(f"{title}{run.hosts} hosts {run.place}", COSTS, rows, failed),
        Table("Parts of the median step, ms", PARTS, rows),
    )


def summarize(results: Results, run: Run, one: Contender) -> dict[str, Any]:
    """Return a contender's `summary` for results.json."""
    row = Row(results, run, one)
    return {**summary(COSTS, row), "parts": summary(PARTS, row)} if one in run.finished else {}
