"""The report and the picture of `bench step`: a bar for each contender, made of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .. import report
from ..report import Bar, Bars, Notes, Page, Part, Section
from ..report.chart import save_bars
from ..results import Contender, Results, Run
from ..table import Table
from ..timing import RULE
from ..words import say_seconds
from .columns import tables
from .findings import headlines, remarks
from .stopwatch import PARTS

_METHOD = (
    "All contenders take turns in one run: each starts, warms up, is measured and stops, and every "
    "other round runs in reverse order, so other load on the machine affects all of them.",
    "All ranks begin a step together. A step's time is the mean over the ranks; the figure shown "
    "is the median over all steps of all rounds, and the quartiles are its spread.",
    RULE,
    "Backward ends when the last gradient is computed. What an exchange does before that is hidden "
    "behind backward; the parts are the rest, and add up to the step. They are those of the mean "
    "step, scaled to the median.",
    "Peers report only when their exchange begins, so packing and unpacking count as exchange. All "
    "run under DistributedDataParallel with its usual buckets; PowerSGD gets a single one.",
)
_LAB = (
    "Each host is a network namespace, and a token bucket limits its link to its rate, both ways. "
    "Bytes sent are those that its interface counted, headers included."
)
_LOOPBACK = (
    "Over loopback nothing is slow but the machine itself, so these times say nothing about a slow "
    "network. Bytes sent are those of the messages; for a peer, of a ring of all hosts."
)


def page(results: Results) -> Page:
    """Return the report."""
    first, *others = headlines(results)
    networks = [run.network for run in results.runs]
    return Page(
        f"Training steps of {results.model['name']}",
        results.setting,
        first,
        report.model_in_words(results.model),
        tuple(_section(results, run) for run in results.runs),
        (
            *_METHOD,
            *report.shared_cores(results.setting, results.runs[0].hosts),
            *([_LAB] if "lab" in networks else []),
            *([_LOOPBACK] if "loopback" in networks else []),
        ),
        tuple(others),
    )


def shown(results: Results) -> Iterator[Table | str]:
    """Return what the terminal shows of each network."""
    for run, headline in zip(results.runs, headlines(results), strict=True):
        yield from tables(results, run)
        yield from (headline, *remarks(run), "")


def save_picture(results: Results, *paths: Path) -> None:
    """Draw the bars of all networks, in the formats that the names of `paths` end in."""
    hosts = results.runs[0].hosts
    title = f"{results.model['name']}, {hosts} hosts: where the time of a training step goes"
    save_bars(title, [bars(run) for run in results.runs], *paths)


def bars(run: Run) -> Bars:
    """Return a bar for each contender on one network."""
    largest = max(one.timing.high for one in run.finished)
    made = (
        Bar(one.name, "failed")
        if one in run.failed
        else Bar(
            one.name,
            say_seconds(one.median, largest),
            tuple(_parts(one)),
            run.against_dense(one),
            one.timing.low,
            one.timing.high,
        )
        for one in run.contenders
    )
    against = ", against dense DDP" if run.dense else ""
    title = f"{_place(run)}: time of a step{against}"
    return Bars(title, tuple(made), run.floor.median, "compute alone")


def _parts(one: Contender) -> Iterator[Part]:
    for name in PARTS:
        seconds = one.parts[name]
        told = f"{name} {say_seconds(seconds)}, {seconds / one.median:.0%} of {one.name}"
        yield Part(name, seconds, told)


def _section(results: Results, run: Run) -> Section:
    costs, parts = tables(results, run)
    notes = Notes(tuple(remarks(run)))
    return Section(_place(run), (bars(run), notes, costs, parts, *report.links(run.links)))


def _place(run: Run) -> str:
    return run.place[0].upper() + run.place[1:]
