"""The outputs of each kind of results: JSON, tables, findings, a report and a picture.

results.json has every sample or point, and beside them the `summary` of each contender: the values
of the columns in `step/columns.py` and `train/columns.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import report
from .report import Page
from .results import SCHEMA, Contender, Results, Run, rounded
from .scale import report as scale
from .scale.view import follows
from .step import columns as step_columns
from .step import report as step
from .table import Table
from .train import columns as train_columns
from .train import report as train


@dataclass(frozen=True)
class Kind:
    """The outputs of one kind of results.

    Args:
        summarize: the `summary` of a contender for results.json.
        shown: tables and sentences for the terminal.
        page: the report.
        save_picture: draws the picture into files.
        follows: derived values that results.json also has.
    """

    summarize: Callable[[Results, Run, Contender], dict[str, Any]]
    shown: Callable[[Results], Iterable[Table | str]]
    page: Callable[[Results], Page]
    save_picture: Callable[..., None]
    follows: Callable[[Results], dict[str, Any]] = lambda results: {}


KINDS = {
    "step": Kind(step_columns.summarize, step.shown, step.page, step.save_picture),
    "train": Kind(train_columns.summarize, train.shown, train.page, train.save_picture),
    "scale": Kind(step_columns.summarize, scale.shown, scale.page, scale.save_picture, follows),
}


def draw(results: Results, folder: Path) -> None:
    """Write report.html and the picture, which is called like the kind."""
    kind = KINDS[results.kind]
    kind.save_picture(results, *(folder / f"{results.kind}{end}" for end in (".png", ".svg")))
    report.save(kind.page(results), folder / "report.html")


def shown(results: Results) -> list[Table | str]:
    """Return the tables and sentences that the terminal shows."""
    return [*KINDS[results.kind].shown(results)]


def as_json(results: Results) -> dict[str, Any]:
    """Return results as JSON can hold them, with derived values."""
    kind = KINDS[results.kind]
    return {
        "schema": SCHEMA,
        "kind": results.kind,
        **asdict(results.setting),
        "model": results.model,
        **results.facts,
        "runs": [
            {
                "hosts": run.hosts,
                "network": run.network,
                "rate": run.rate,
                "links": [asdict(link) for link in run.links],
                "contenders": [
                    _contender(one, kind.summarize(results, run, one)) for one in run.contenders
                ],
            }
            for run in results.runs
        ],
        **kind.follows(results),
    }


def _contender(one: Contender, summary: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": one.name, "kind": one.kind, "failed": one.failed}
    if summary:
        fields["summary"] = summary
    for name in ("samples", "points"):
        if found := getattr(one, name):
            fields[name] = [asdict(each) for each in found]
    return rounded(fields)  # type: ignore[no-any-return]
