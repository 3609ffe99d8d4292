"""The report of a race, to open in a browser: the answer first, then all that led to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sparsewire.report import plural

from .. import drawing, html
from ..timing import RULE
from .picture import draw
from .results import Race, headline, remarks
from .table import HEADINGS, cells

_STYLE = ".drawing { width: 100%; height: auto; }\n"
_METHOD = (
    "Every contender trains from the same initial weights on the same batches in the same order, "
    "one after the other, on the same network.",
    "The clock counts training steps alone, on the slowest rank. It stands still while processes "
    "start, while a contender sets itself up, and while the test set is looked at.",
    "The test set is the same for all, shared out over the hosts. The time to the target "
    "is that of the first look at which it was reached, so it is known to the number of steps "
    "between two looks. Its spread covers all of them, at the quartiles of the time per step.",
    RULE,
    "The learning rate is the same for all and was chosen so that dense DDP gets there soon; no "
    "contender has one of its own.",
)


def save(race: Race, path: Path) -> None:
    """Write the page."""
    path.write_text(render(race), encoding="utf-8")


def render(race: Race) -> str:
    """The page as one string."""
    title = f"To {race.aim} on {race.hosts} hosts"
    return html.document(title, _STYLE, _body(race))


def _body(race: Race) -> Iterator[str]:
    model, goal = race.model, race.goal
    told = html.escape(
        f"A {goal.network} with {plural(model['parameters'], 'parameter')} in "
        f"{plural(model['tensors'], 'tensor')}, {plural(model['examples'], goal.example)} per host "
        f"and step."
    )
    yield (
        f"{html.opening(race.setting, headline(race))}"
        f'<p class="soft">{told} {html.prose(race.setting.created[:10])}.</p>'
    )
    names = tuple(heading.strip().replace("\n", " ") for heading in HEADINGS)
    yield (
        f"<section><h2>{goal.score.capitalize()} over time</h2>"
        f"{drawing.inline(draw(race), headline(race))}"
        f"{html.table(('', *names), ([one.name, *cells(race, one)] for one in race.runners))}"
        f"{html.paragraphs(remarks(race))}{_points(race)}{html.links(race.links)}</section>"
    )
    yield (
        "<section><h2>What was measured, and how</h2>"
        f"{html.paragraphs([*_METHOD, *html.shared_cores(race.setting, race.hosts)])}"
        f"<details open><summary>Machine, versions and command</summary>"
        f"{html.setting(race.setting)}</details></section>"
    )


def _points(race: Race) -> str:
    rows = [
        [one.name, str(point.step), f"{point.seconds:.1f}", race.goal.shown(point.score)]
        for one in race.runners
        for point in one.points
    ]
    shown = html.table(("", "step", "seconds", race.goal.score), rows)
    return f"<details><summary>Every look at the test set</summary>{shown}</details>"
