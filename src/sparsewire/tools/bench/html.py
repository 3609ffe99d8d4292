"""Pages that stand on their own: one file, no script, nothing fetched, every text escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparsewire.report import plural

from ..lab import Link
from .results import say_rate
from .setting import Setting

# What a page may load is nothing at all, whatever got into it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2530; --soft: #5b6675; --line: #dfe3e8;
  --paper: #fbfbfa; --card: #ffffff; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #9aa4b1; --line: #333b46;
  --paper: #14181d; --card: #1b2027; --accent: #56b4e9; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 3rem 1.25rem 4rem; }
h1 { font-size: clamp(1.5rem, 4.2vw, 2.3rem); line-height: 1.25; letter-spacing: -.015em;
  margin: 0 0 1rem; text-wrap: balance; }
h2 { font-size: 1.25rem; margin: 0 0 .4rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p { margin: .4rem 0; max-width: 46rem; }
.kicker { color: var(--accent); font-weight: 600; margin: 0 0 .6rem; }
.soft { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 1.4rem; margin: 1.6rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  font-size: .9rem; margin: .6rem 0; }
th, td { padding: .38rem .55rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 9rem; }
th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
tr:last-child td { border-bottom: 0; }
code { font: .88em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  overflow-wrap: anywhere; }
ul { padding-left: 1.2rem; margin: .5rem 0; } li { margin: .3rem 0; max-width: 46rem; }
details { margin-top: .8rem; } summary { cursor: pointer; color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; margin: .6rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.together { white-space: nowrap; }
"""
# "2.27 s", "1 Gbit/s", "97 %", "2.8× faster" and dates, with or without the time.
_TOGETHER = re.compile(
    r"\d[\d.,]* (?:[mµn]?s|%|[kMG]?bit/s|[kMG]?B|GiB)(?!\w)|[\d.]*\d× \w+|\d{4}-\d\d-\d\d[\dT:+]*"
)


def escape(text: object) -> str:
    """A text that cannot be anything else."""
    return html.escape(str(text), quote=True)


def prose(text: object) -> str:
    """A text to read, in which no line ends between a number and its unit or inside a date."""
    return _TOGETHER.sub(r'<span class="together">\g<0></span>', escape(text))


def document(title: str, style: str, body: Iterable[str]) -> str:
    """A whole page; `body` and `style` are trusted, `title` is not."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )


def opening(of: Setting, headline: str) -> str:
    """The command and what it found."""
    command = escape(of.arguments["command"])
    return f'<p class="kicker">{command}</p>\n<h1>{prose(headline)}</h1>\n'


def subject(of: Setting, model: Mapping[str, Any]) -> str:
    """What was trained, and when."""
    examples = model["examples"]
    batch = f", {plural(examples, 'example')} per host and step" if examples else ""
    size = f"{plural(model['parameters'], 'parameter')} in {plural(model['tensors'], 'tensor')}"
    told = escape(f"{model['name']}: {size}{batch}.")
    return f'<p class="soft">{told} {prose(of.created[:10])}.</p>'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that can be moved sideways where it does not fit."""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    lines = ("".join(f"<td>{prose(cell)}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


def paragraphs(texts: Iterable[str]) -> str:
    """Each text as a point of a list."""
    return "<ul>" + "".join(f"<li>{prose(text)}</li>" for text in texts) + "</ul>"


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Names and what they are."""
    inner = "".join(f"<dt>{escape(name)}</dt><dd>{prose(fact)}</dd>" for name, fact in pairs)
    return f"<dl>{inner}</dl>"


def setting(of: Setting) -> str:
    """The machine, the programs and the command."""
    machine = of.machine
    return facts(
        [
            ("machine", f"{machine['cpu']}, {plural(machine['cores'], 'core')}"),
            ("memory", f"{machine['memory'] / 2**30:.0f} GiB"),
            ("system", machine["system"]),
            *of.versions.items(),
            ("commit", of.commit or "not known"),
            ("measured", of.created),
            *((name.replace("_", " "), _shown(value)) for name, value in of.arguments.items()),
        ]
    )


def shared_cores(of: Setting, hosts: int) -> list[str]:
    """What to say where hosts have no cores of their own."""
    cores = of.machine["cores"]
    if cores >= 2 * hosts:
        return []
    return [
        f"The {hosts} hosts share {plural(cores, 'core')} of one machine, so computing, "
        f"choosing and coding take longer here than on machines of their own."
    ]


def links(measured: Sequence[Link], where: str = "") -> str:
    """What TCP got out of the links of a lab; nothing without one."""
    if not measured:
        return ""
    rows = [
        [
            link.name,
            "unshaped" if link.asked is None else say_rate(link.asked),
            say_rate(link.up),
            say_rate(link.down),
        ]
        for link in measured
    ]
    shown = table(("link", "asked for", "up", "down"), rows)
    return (
        f"<details><summary>What TCP got out of each link{escape(where)}</summary>{shown}</details>"
    )


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if value is None:
        return "default"
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)
