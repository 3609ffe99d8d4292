"""The report of a measurement over sizes: the answer, what was measured, and the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .. import drawing, html
from ..results import say_seconds
from ..timing import RULE
from .picture import draw
from .results import Scale, headline, remarks
from .table import MEASURED, measured_rows, modelled_headings, modelled_rows

_STYLE = ".drawing { width: 100%; height: auto; }\n"
_METHOD = (
    "On every number of hosts, all contenders take turns in one run, compute alone among them, as "
    "in sparsewire bench step. A step's time is the median over all steps of all rounds, "
    "and the quartiles are its spread.",
    RULE,
    "Bytes received are those of the messages. For schemes they follow exactly from their sizes, "
    "and the measured points are what each rank counted; for dense DDP they are those of a ring "
    "all-reduce.",
)
_MODEL = (
    "Modelled, not measured: step(W) − compute(W) = a + l·hops + b·bytes + "
    "s·(c·bytes + d·looked_at + g·added), for W hosts. Hops are W − 1 for each "
    "all-gather of a step and twice that for each all-reduce; bytes are those a host "
    "receives; looked_at are the values that a scheme selects from; added are the selected values "
    "that a host adds up one by one: those of all hosts, or, where they are added on the way, as "
    "many as one host selects.",
    "s = max(1, W / cores) is how many hosts a core of this machine serves. It stretches the "
    "work of a host's own core, which moves bytes, selects and adds up, and nothing else.",
    "The six coefficients are the same for all contenders. They are not below zero, and have the "
    "least squared errors over all measured points, each error taken as a share of the measured "
    "step.",
    "To more hosts than measured, the model goes with s = 1, as if each had cores of its own, and "
    "with compute as for one host that has this machine for itself. It knows nothing of switches "
    "that are shared, of stragglers, and of collectives that are no ring.",
    "What of an exchange hides behind backward is in the coefficients only as far as it did so in "
    "the measured steps.",
)


def save(scale: Scale, path: Path) -> None:
    """Write the page."""
    path.write_text(render(scale), encoding="utf-8")


def render(scale: Scale) -> str:
    """The page as one string."""
    title = f"Steps of {scale.model['name']} against the number of hosts"
    return html.document(title, _STYLE, _body(scale))


def _body(scale: Scale) -> Iterator[str]:
    model, first = scale.model, headline(scale)
    yield html.opening(scale.setting, first) + html.subject(scale.setting, model)
    yield (
        f"<section><h2>Bytes and time against the number of hosts</h2>"
        f"{drawing.inline(draw(scale), first)}{html.paragraphs(remarks(scale))}</section>"
    )
    links = "".join(html.links(run.links, f" of {hosts} hosts") for hosts, run in scale.runs)
    yield (
        "<section><h2>Measured, and the model beside it</h2>"
        f"{html.table(('', *MEASURED), measured_rows(scale))}{links}</section>"
    )
    yield (
        "<section><h2>Modelled, not measured: hosts with cores of their own</h2>"
        f"{html.table(('', *modelled_headings(scale)), modelled_rows(scale))}"
        f"{html.paragraphs(_MODEL)}{_coefficients(scale)}</section>"
    )
    most = max(hosts for hosts, _ in scale.runs)
    yield (
        "<section><h2>What was measured, and how</h2>"
        f"{html.paragraphs([*_METHOD, *html.shared_cores(scale.setting, most)])}"
        f"<details open><summary>Machine, versions and command</summary>"
        f"{html.setting(scale.setting)}</details></section>"
    )


def _coefficients(scale: Scale) -> str:
    fitted = scale.fitted
    return html.facts(
        [
            ("a", f"{say_seconds(fitted.step)} per step"),
            ("l", f"{1e6 * fitted.hop:.3g} µs per hop"),
            ("b", f"{1e9 * fitted.byte:.3g} ns per byte received, on the link"),
            ("c", f"{1e9 * fitted.move:.3g} ns per byte received, of a core"),
            ("d", f"{1e9 * fitted.look:.3g} ns per value looked at"),
            ("g", f"{1e9 * fitted.addition:.3g} ns per value added"),
            ("compute", f"{say_seconds(scale.alone)} on one host alone"),
        ]
    )
