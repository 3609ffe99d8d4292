"""`sparsewire compare`: several schemes on one task, in turn, as a table, a plot and JSON."""

from __future__ import annotations

import signal
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from sparsewire.report import human_bytes, plural

from . import plot
from .errors import USAGE, CommandError
from .options import Compare
from .plan import check
from .publish import make_folder, publish
from .recorder import Recorder, Result
from .records import SCHEMA, versions
from .train import plans, run, under_torchrun

_HEADINGS = (
    "test\naccuracy",
    "against\nthe first",
    "sent per\nstep",
    "less than\ndense",
    "median\nstep",
    "against\nthe first",
)


def compare(options: Compare) -> int:
    """Train every scheme in turn, then show how they did."""
    check(options)
    if under_torchrun():
        raise CommandError("compare starts its own workers: run it without torchrun", USAGE)
    made = plans(options, options.schemes, options.workers)
    make_folder(options.out)
    record = Recorder(options.out / "metrics.jsonl", append=False, quiet=options.quiet)
    with record:
        stopped_by = run(made, options, record)
    # A stopped run is no result.
    results = [result for result in record.results if not result.summary["stopped"]]
    if results:
        _save(options, results)
    if len(results) < len(made):
        raise CommandError(
            f"stopped; finished {len(results)} of {plural(len(made), 'scheme')}",
            128 + (stopped_by or signal.SIGINT),
        )
    return 0


def _save(options: Compare, results: list[Result]) -> None:
    """Write results.json and the plot, and print the table or the JSON."""
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "task": "mnist",
        "versions": versions(),
        "results": [{**result.summary, "test_accuracies": result.accuracies} for result in results],
    }
    picture = options.out / "comparison.png"
    publish(
        options.out,
        content,
        lambda out: plot.save(results, picture, options.rate),
        [_table(results, options.rate), f"plot: {picture}"],
        options.json,
    )


def _table(results: list[Result], rate: str | None) -> Table:
    first = results[0].summary["test_accuracy"]
    title = f"MNIST, {plural(results[0].summary['workers'], 'worker')}"
    title += f" at {rate}" if rate else ""
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=0, pad_edge=False)
    table.add_column("\nscheme", style="bold", overflow="fold")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for number, result in enumerate(results):
        told = result.summary
        difference = 100 * (told["test_accuracy"] - first)
        table.add_row(
            result.name,
            f"{told['test_accuracy']:.2%}",
            f"{difference:+.2f}" if number else "",
            human_bytes(told["bytes_per_step"]),
            f"{told['reduction']:.1f}×",
            f"{1000 * told['step_seconds']:.1f} ms",
            result.timing.verdict(results[0].timing) if number else "",
        )
    return table
