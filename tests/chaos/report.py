"""The table of a run: for each kind of fault, what was promised, what held, and how fast.

python -m tests.chaos.report     # puts the table of the results on file into docs/reliability.md
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import sparsewire as sw

from .crew import Result
from .faults import FAULTS
from .trials import FORMS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "chaos"
PAGE = ROOT / "docs" / "reliability.md"
MARKS = ("<!-- the table of make chaos -->\n", "<!-- end of the table -->\n")
DEAD = 2.0  # seconds in which all should know of a dead process
IDLE = 2.0  # load below which that is measured
DEATHS = (
    "kill -9",
    "leaving",
    "exception",
    "kill -9 while saving",
    "kill -9 of the store's process",
)


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return what the table shows, and what the results were obtained with."""
    rows = []
    for fault in FAULTS:
        mine = [each for each in results if each.trial.fault == fault.name]
        played = [each for each in mine if not each.skipped]
        known = [each.known for each in played if each.known is not None]
        ended = [each.ended for each in played if each.ended is not None]
        rows.append(
            {
                "fault": fault.name,
                "promise": fault.promise,
                "trials": len(played),
                "held": sum(each.held for each in played),
                "skipped": len(mine) - len(played),
                "known": _spread(known),
                "ended": _spread(ended),
            }
        )
    families: dict[str, int] = {}
    for each in results:
        if not each.skipped:
            family = FORMS[each.trial.form].family
            families[family] = families.get(family, 0) + 1
    waiting = {fault.name for fault in FAULTS if fault.waits}
    deadlines = [each.trial.timeout for each in results if each.trial.fault in waiting]
    loads = [each.load for each in results if each.load]
    dead = [
        each.known
        for each in results
        if each.trial.fault in DEATHS and each.known is not None and each.load < IDLE
    ]
    return {
        "rows": rows,
        "families": families,
        "load": [round(bound(loads, default=0.0)) for bound in (min, max)],
        "deadlines": [round(bound(deadlines, default=0.0)) for bound in (min, max)],
        "dead": {"trials": len(dead), "within": sum(each <= DEAD for each in dead)},
        "trials": sum(row["trials"] for row in rows),
        "held": sum(row["held"] for row in rows),
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "sparsewire": sw.__version__,
        },
    }


def _spread(seconds: Sequence[float]) -> list[float] | None:
    return [round(statistics.median(seconds), 1), round(max(seconds), 1)] if seconds else None


def markdown(found: Mapping[str, Any]) -> str:
    """Return the table, and what it was obtained with."""
    lines = [
        "| fault | promise | held | all knew after | last rank ended after |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for row in found["rows"]:
        if not row["trials"]:
            continue
        cells = row["fault"], row["promise"], f"{row['held']} of {row['trials']}"
        lines.append(f"| {' | '.join((*cells, *map(_seconds, (row['known'], row['ended']))))} |")
    families = ", ".join(f"{count} {name}" for name, count in found["families"].items())
    dead, machine, load, deadlines = map(found.get, ("dead", "machine", "load", "deadlines"))
    lines += [
        "",
        f"{found['held']} of {found['trials']} trials held: {families}. Seconds are the median and "
        f"the worst; – stands where training goes on. Deadlines were "
        f"{_between(deadlines)} s. The machine had {machine['cores']} cores and a load of "
        f"{_between(load)} from these and other programs.",
    ]
    if dead["trials"]:
        lines[-1] += (
            f" Of {dead['trials']} deaths at a load below {IDLE:g}, {dead['within']} were known to "
            f"all within {DEAD:g} s."
        )
    return "\n".join(lines)


def _between(bounds: Sequence[int]) -> str:
    return " to ".join(map(str, dict.fromkeys(bounds)))


def _seconds(spread: Sequence[float] | None) -> str:
    return "–" if spread is None else f"{spread[0]:.1f} s, {spread[1]:.1f} s"


def read(folder: Path) -> list[Result]:
    """Return the results that were written, if any were."""
    path = folder / "chaos.json"
    content = json.loads(path.read_text()) if path.exists() else {"results": []}
    return [Result.from_dict(each) for each in content["results"]]


def write(results: Sequence[Result], folder: Path) -> None:
    """Write the results as chaos.json and the table as chaos.md."""
    folder.mkdir(parents=True, exist_ok=True)
    found = summary(results)
    content = {**found, "results": [each.to_dict() for each in results]}
    (folder / "chaos.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    (folder / "chaos.md").write_text(markdown(found) + "\n")


def publish() -> None:
    """Put the table of the results on file into the page."""
    before, rest = PAGE.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    table = (RESULTS / "chaos.md").read_text()
    PAGE.write_text(f"{before}{MARKS[0]}{table}{MARKS[1]}{after}")


if __name__ == "__main__":
    publish()
