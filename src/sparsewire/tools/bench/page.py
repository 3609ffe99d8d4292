"""The report of a measurement, to open in a browser: the answer first, then all that led to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from . import html
from .colours import OF_PARTS
from .html import escape
from .results import Contender, Results, Run, headlines, remarks, say_seconds
from .stopwatch import PARTS
from .table import COSTS, cost_cells, milliseconds
from .timing import RULE

_STYLE = """
.key { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: 1rem 0 .6rem; padding: 0;
  list-style: none; font-size: .85rem; color: var(--soft); }
.key li { margin: 0; } .key svg { width: .7rem; height: .7rem; margin-right: .35rem; }
.bars { margin: .5rem 0 0; padding: 0; list-style: none; }
.bars li { display: grid; grid-template-columns: 15rem 1fr 8.5rem; column-gap: .9rem; margin: 0;
  align-items: center; max-width: none; font-size: .92rem; }
.bars svg { display: block; width: 100%; height: 2rem; overflow: visible; }
.bars b { font-variant-numeric: tabular-nums; } .bars .name { overflow-wrap: anywhere; }
.floor { stroke: var(--ink); stroke-dasharray: 4 3; opacity: .65;
  vector-effect: non-scaling-stroke; }
.spread { stroke: var(--ink); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
@media (max-width: 46rem) {
  .bars li { grid-template-columns: 1fr auto; } .bars svg { grid-column: 1 / 3; grid-row: 2; }
}
""" + "".join(f".{part} {{ fill: {colour}; }}\n" for part, colour in OF_PARTS.items())
_METHOD = (
    "All contenders take turns in one run: each enters, warms up, is measured and leaves, and "
    "every other round goes backwards, so that whatever changes on the machine meanwhile meets "
    "all of them.",
    "All ranks begin a step together. A step's time is the mean over the ranks; what is shown is "
    "the median over all steps of all rounds, and the quartiles beside it are its spread.",
    RULE,
    "Backward ends when the last gradient is there. What of an exchange happens before that is "
    "hidden behind it and costs no time; the parts are what is left, and add up to the step. They "
    "are those of the mean step, scaled to the median.",
    "Peers tell only when their exchange begins, so packing and unpacking count as exchange. All "
    "run under DistributedDataParallel with its usual buckets; PowerSGD gets a single one.",
)


def save(results: Results, path: Path) -> None:
    """Write the page."""
    path.write_text(render(results), encoding="utf-8")


def render(results: Results) -> str:
    """The page as one string."""
    return html.document(f"Training steps of {results.model['name']}", _STYLE, _body(results))


def _body(results: Results) -> Iterator[str]:
    first, *others = headlines(results)
    model = results.model
    yield html.opening(results.setting, first) + html.subject(results.setting, model)
    yield "".join(f"<p>{html.prose(sentence)}</p>" for sentence in others)
    for run in results.runs:
        yield _network(results, run)
    shared = html.shared_cores(results.setting, results.hosts)
    yield (
        "<section><h2>What was measured, and how</h2>"
        f"{html.paragraphs([*_METHOD, *shared, *_networks(results)])}"
        f"<details open><summary>Machine, versions and command</summary>"
        f"{html.setting(results.setting)}</details></section>"
    )


def _networks(results: Results) -> Iterator[str]:
    if any(run.network == "lab" for run in results.runs):
        yield (
            "Each host is a network namespace of its own, and a token bucket holds its link to its "
            "rate, both ways. Bytes sent are those that its interface counted, headers included."
        )
    if any(run.network == "loopback" for run in results.runs):
        yield (
            "Over loopback nothing is slow but the machine itself: take it as a test, not as a "
            "figure. Bytes sent are those of the messages; for a peer, of a ring of all hosts."
        )


def _network(results: Results, run: Run) -> str:
    place = run.place[0].upper() + run.place[1:]
    parts = html.table(
        ("", *PARTS),
        ([one.name, *(milliseconds(one.parts[part]) for part in PARTS)] for one in run.finished),
    )
    costs = html.table(
        ("", *COSTS), ([one.name, *cost_cells(results, run, one)] for one in run.finished)
    )
    return (
        f"<section><h2>{html.prose(place)}</h2>{_key(run)}{_bars(run)}"
        f"{html.paragraphs(remarks(run))}{costs}"
        f"<h3>Parts of the median step, in milliseconds</h3>{parts}"
        f"{html.links(run.links)}</section>"
    )


def _key(run: Run) -> str:
    used = [part for part in PARTS if any(one.parts[part] > 0 for one in run.finished)]
    items = "".join(
        f'<li><svg viewBox="0 0 1 1" aria-hidden="true"><rect class="{part}" width="1" '
        f'height="1"/></svg>{part}</li>'
        for part in used
    )
    return f'<ul class="key">{items}<li>┆ compute alone</li></ul>'


def _bars(run: Run) -> str:
    largest = max(max(one.median, one.quartiles[1]) for one in run.finished)
    rows = []
    for one in run.contenders:
        if one in run.failed:
            cells = '<span class="soft"></span><span class="soft">failed</span>'
        else:
            took, against = say_seconds(one.median, largest), run.against_dense(one)
            cells = (
                f'{_bar(run, one, largest)}<span><b class="together">{took}</b> '
                f'<span class="soft">{html.prose(against)}</span></span>'
            )
        rows.append(f'<li><span class="name">{escape(one.name)}</span>{cells}</li>')
    return f'<ul class="bars">{"".join(rows)}</ul>'


def _bar(run: Run, one: Contender, largest: float) -> str:
    """One bar, a thousand units for the longest."""
    scale, left, pieces = 1000 / largest, 0.0, []
    for part in PARTS:
        width = scale * one.parts[part]
        if width > 0:
            told = f"{part} {say_seconds(one.parts[part])}"
            pieces.append(
                f'<rect class="{part}" x="{left:.1f}" y="5" width="{width:.1f}" height="22">'
                f"<title>{told}</title></rect>"
            )
        left += width
    low, high = (scale * quartile for quartile in one.quartiles)
    floor = scale * run.floor.median
    return (
        '<svg viewBox="0 0 1000 32" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(one.name)}: {say_seconds(one.median)}">{"".join(pieces)}'
        f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="16" y2="16"/>'
        f'<line class="floor" x1="{floor:.1f}" x2="{floor:.1f}" y1="0" y2="32"/></svg>'
    )
