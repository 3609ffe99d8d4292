"""One report page for all commands: its parts, and how they become HTML.

A `Page` has sections, a section has blocks. Each block names the template that shows it, in
`templates/`, where style and script are too. A page is one file that fetches nothing: its content
security policy allows the one script that is vendored here, by its hash, and everything else is
escaped.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from sparsewire.report import plural

from ...lab import Link
from ..drawing import LINES_ON_DARK, OF_LINES, OF_PARTS
from ..setting import Setting
from ..table import Column, Table
from ..words import say_rate

_TEMPLATES = Path(__file__).parent / "templates"
# "2.27 s", "1 Gbit/s", "97 %", "2.8× faster" and dates, with or without the time.
_TOGETHER = re.compile(
    r"\d[\d.,]* (?:[mµn]?s|%|[kMG]?bit/s|[kMG]?B|GiB)(?!\w)|[\d.]*\d× \w+|\d{4}-\d\d-\d\d[\dT:+]*"
)
_NOT_OPTIONS = ("command", "task", "contenders", "json", "quiet", "debug")


class Block(Protocol):
    """A part of a section; `template` is the file that shows it."""

    @property
    def template(self) -> str:
        """Return the template's name."""


@dataclass(frozen=True)
class Notes:
    """Sentences, each a point of a list."""

    sentences: tuple[str, ...]
    template = "notes.html"


@dataclass(frozen=True)
class Facts:
    """Pairs of a name and a fact."""

    pairs: tuple[tuple[str, str], ...]
    template = "facts.html"


@dataclass(frozen=True)
class Folded:
    """A block that opens on a click."""

    title: str
    block: Block
    template = "folded.html"


@dataclass(frozen=True)
class Part:
    """A part of a bar."""

    name: str
    value: float
    told: str


@dataclass(frozen=True)
class Bar:
    """One bar: its parts, its total in words, how it compares, and its spread.

    A bar without parts says in `told` why there are none.
    """

    name: str
    told: str
    parts: tuple[Part, ...] = ()
    verdict: str = ""
    low: float = 0.0
    high: float = 0.0

    @property
    def total(self) -> float:
        """The length of the bar."""
        return sum(part.value for part in self.parts)


@dataclass(frozen=True)
class Bars:
    """Bars below each other, with a line at `floor`, the least possible value."""

    title: str
    bars: tuple[Bar, ...]
    floor: float | None = None
    floor_name: str = ""
    template = "bars.html"

    @property
    def largest(self) -> float:
        """The end of the scale."""
        return max((max(bar.total, bar.high) for bar in self.bars), default=0.0) or 1.0

    @property
    def parts(self) -> list[str]:
        """The names of the parts that have any length, in their order."""
        names = [part.name for bar in self.bars for part in bar.parts]
        used = {part.name for bar in self.bars for part in bar.parts if part.value > 0}
        return [name for name in dict.fromkeys(names) if name in used]


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Page:
    """A report: the answer first, then all that led to it, at the end how it was measured."""

    title: str
    setting: Setting
    headline: str
    subject: str
    sections: tuple[Section, ...]
    method: tuple[str, ...]
    more: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command that was run."""
        return str(self.setting.arguments["command"])


def save(page: Page, path: Path) -> None:
    """Write the page as one file."""
    path.write_text(render(page), encoding="utf-8")


def render(page: Page) -> str:
    """Return the page as HTML."""
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        _templates()
        .get_template("page.html")
        .render(
            page=page,
            command_line=command_line(page.setting.arguments),
            environment=_environment(page.setting),
            script=Markup(script),  # ours, and checked against its hash by the browser
            policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
            lines=list(zip(OF_LINES, LINES_ON_DARK, strict=True)),
            parts=OF_PARTS,
        )
    )


@cache
def _templates() -> Environment:
    """Return the templates, in which every text is escaped and no name may be missing."""
    found = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["prose"] = prose
    return found


def prose(text: object) -> Markup:
    """Return a text in which no line ends between a number and its unit or inside a date."""
    kept = _TOGETHER.sub(r'<span class="together">\g<0></span>', str(escape(text)))
    return Markup(kept)  # escaped above


def model_in_words(model: dict[str, Any]) -> str:
    """Describe the model."""
    examples = model["examples"]
    batch = f", {plural(examples, 'example')} per host and step" if examples else ""
    size = f"{plural(model['parameters'], 'parameter')} in {plural(model['tensors'], 'tensor')}"
    return f"{model['name']}: {size}{batch}."


def command_line(arguments: dict[str, Any]) -> str:
    """Return the command with its options, defaults included, as one would type it.

    >>> print(command_line({"command": "sparsewire bench step", "rates": ["1gbit"], "seed": 0}))
    sparsewire bench step \\
      --rates 1gbit \\
      --seed 0
    """
    lines = [str(arguments["command"])]
    if lines == ["sparsewire demo"]:  # it chooses all others itself
        arguments = {name: arguments.get(name) for name in ("model", "data", "out")}
    for name, value in arguments.items():
        if name in _NOT_OPTIONS or value is None or value is False or value in ([], ()):
            continue
        values = value if isinstance(value, (list, tuple)) else [value]
        words = [] if value is True else [shlex.quote(str(one)) for one in values]
        lines.append(" ".join([f"--{name.replace('_', '-')}", *words]))
    return " \\\n  ".join(lines)


def shared_cores(setting: Setting, hosts: int) -> tuple[str, ...]:
    """Return a caveat if hosts share cores."""
    cores = setting.machine["cores"]
    if cores >= 2 * hosts:
        return ()
    return (
        f"The {hosts} workers share {plural(cores, 'core')} of one machine, so computing, "
        f"selecting and coding take longer here than on machines of their own.",
    )


_LINKS: tuple[Column[Link], ...] = (
    Column("asked", "asked for", "", "", lambda link: link.asked, say_rate, lambda _: "unshaped"),
    Column("up", "up", "", "", lambda link: link.up, say_rate),
    Column("down", "down", "", "", lambda link: link.down, say_rate),
)


def links(measured: Iterable[Link], where: str = "") -> tuple[Block, ...]:
    """Return the TCP throughput of the links of a lab, folded; nothing without a lab."""
    rows = [(link.name, link) for link in measured]
    table = Table("", _LINKS, rows)
    return (Folded(f"TCP throughput of each link{where}", table),) if rows else ()


def _environment(setting: Setting) -> Facts:
    """Return the machine and the programs."""
    machine = setting.machine
    return Facts(
        (
            ("machine", f"{machine['cpu']}, {plural(machine['cores'], 'core')}"),
            ("memory", f"{machine['memory'] / 2**30:.0f} GiB"),
            ("system", machine["system"]),
            *setting.versions.items(),
            ("commit", setting.commit or "not known"),
            ("measured", setting.created),
        )
    )
