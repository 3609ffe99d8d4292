"""The report and the picture of `bench step`: a bar for each contender, made of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .. import report
from ..drawing import write
from ..report import Bar, Bars, Notes, Page, Part, Section
from ..report.chart import draw_bars
from ..results import Contender, Results, Run
from ..table import Table
from ..timing import RULE, conclusion, ties
from ..words import say_seconds
from .columns import tables
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
    write(draw_bars(title, [bars(run) for run in results.runs]), *paths)


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


def headlines(results: Results) -> list[str]:
    """Return the main finding on each network, in one sentence."""
    return [_headline(run) for run in results.runs]


def _headline(run: Run) -> str:
    where = f"On {run.hosts} hosts {run.place}"
    if not run.schemes:
        return f"{where}, no scheme was measured."
    if run.dense is not None:
        return f"{where}, {comparison(run)}."
    best, *others = run.schemes
    took, times = say_seconds(best.median), best.median / run.floor.median
    tied = ties(best.timing, {one.name: one.timing for one in others})
    return f"{where}, a step takes {took} with {best.name}, {times:.2f}× compute alone{tied}."


def comparison(run: Run) -> str:
    """Compare the fastest scheme with dense DDP, both of which took part."""
    (best, *others), dense = run.schemes, run.dense
    assert dense is not None
    fast, slow = say_seconds(best.median, dense.median), say_seconds(dense.median, best.median)
    found = conclusion(best.timing, dense.timing, {one.name: one.timing for one in others})
    return f"a step takes {fast} with {best.name}, {slow} with dense DDP: {found}"


def remarks(run: Run) -> list[str]:
    """Return everything else worth knowing about a network, whoever it speaks for."""
    said = []
    if run.schemes:
        best, dense = run.schemes[0], run.dense
        for one in sorted(run.peers, key=lambda one: one.median):
            times = f"{say_seconds(one.median)} against {say_seconds(best.median)}"
            if one.timing.beats(best.timing):
                said.append(f"{one.name} is faster than {best.name}: {times}.")
            elif not best.timing.beats(one.timing):
                said.append(f"{one.name} cannot be told apart from {best.name}: {times}.")
        slower = [one.name for one in run.schemes if dense and dense.timing.beats(one.timing)]
        if slower:
            said.append(f"Slower than dense DDP: {', '.join(slower)}.")
        said.append(
            f"Compute alone takes {say_seconds(run.floor.median)}; {best.name} takes "
            f"{best.median / run.floor.median:.2f} times that."
        )
    said += [f"{one.name} failed: {one.failed}" for one in run.failed]
    return said + slow_links(run)


def slow_links(run: Run) -> list[str]:
    """Return a sentence for each link that is off its rate."""
    return [
        f"The link of {link.name} is more than 10 % off its rate."
        for link in run.links
        if not link.fits
    ]
