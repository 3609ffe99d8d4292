"""`sparsewire compare`: several schemes on one task, in turn, as a table, a plot and JSON."""

from __future__ import annotations

import signal
from typing import Any

from sparsewire.report import plural

from ..bench.compare import Result, table, write
from ..bench.setting import Setting, arguments
from .errors import USAGE, CommandError
from .options import Compare
from .plan import check
from .publish import make_folder, publish
from .recorder import Recorder
from .train import plans, run, under_torchrun
from .train_rank import SCHEMA, versions


def compare(options: Compare) -> int:
    """Train every scheme in turn, then show how they did."""
    check(options)
    if under_torchrun():
        raise CommandError("compare starts its own workers: run it without torchrun", USAGE)
    made = plans(options, options.schemes, options.workers)
    make_folder(options.out)
    record = Recorder(options.out / "metrics.jsonl", append=False, quiet=options.quiet)
    stopped_by, failure = None, None
    with record:
        try:
            stopped_by = run(made, options, record)
        except CommandError as error:
            failure = error
    # A stopped run is no result.
    results = [result for result in record.results if not result.summary["stopped"]]
    if results:
        _save(options, results)
    finished = f"finished {len(results)} of {plural(len(made), 'scheme')}"
    if failure is not None:
        raise CommandError(f"{failure} ({finished})", failure.code) from failure
    if len(results) < len(made):
        raise CommandError(f"stopped; {finished}", 128 + (stopped_by or signal.SIGINT))
    return 0


def _save(options: Compare, results: list[Result]) -> None:
    """Write results.json and the plot, and print the table or the JSON."""
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "task": "mnist",
        "versions": versions(),
        "results": [{**result.summary, "test_accuracies": result.accuracies} for result in results],
    }
    setting = Setting.here(arguments("sparsewire compare mnist", options))
    publish(
        options.out,
        content,
        lambda out: write(results, options.rate, setting, out),
        [table(results, options.rate), f"report: {options.out / 'report.html'}"],
        options.json,
    )
