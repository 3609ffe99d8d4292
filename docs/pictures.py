"""The pictures of the pages: drawings, and measured pictures in the colours of a dark page.

    python docs/pictures.py

writes each drawing into docs/images, as an SVG for light and one for dark pages. Measured pictures
are drawn by the command that measures; for a page that shows `NAME-dark.svg`, this script makes it
from the `NAME.svg` beside it. A test checks that all of them are up to date.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from sparsewire.tools.bench.drawing import FAINT, INK, LINES_ON_DARK, OF_LINES, OF_PARTS

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
RANKS = ("#D55E00", "#0072B2", "#009E73")  # for the eye: this rank, and two others


@dataclass(frozen=True)
class Palette:
    """The colours of a page."""

    ink: str
    faint: str
    line: str
    lane: str
    box: str
    edge: str
    kept: str


LIGHT = Palette(INK, "#5a6672", "#d5dbe1", "#f4f6f8", "#ffffff", "#0072B2", "#a9b4be")
DARK = Palette("#e6e9ec", "#9aa7b3", "#3b444d", "#1b2026", "#262d34", "#56B4E9", "#66727d")


@dataclass
class Drawing:
    """An SVG that is put together from boxes, texts and arrows."""

    width: float
    height: float
    label: str
    palette: Palette
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 14,
        anchor: str = "middle",
        weight: int = 400,
        colour: str | None = None,
    ) -> None:
        """Write one line of text, whose baseline is at `y`."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" '
            f'font-weight="{weight}" fill="{colour or self.palette.ink}">{escape(words)}</text>'
        )

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str,
        edge: str = "none",
        radius: float = 0,
        dashed: bool = False,
    ) -> None:
        """Draw a rectangle."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{fill}" stroke="{edge}" stroke-width="1.5"{dashes}/>'
        )

    def lane(self, y: float, height: float, name: str) -> None:
        """Draw a band over the whole width with its name."""
        colours = self.palette
        self.rect(10, y, self.width - 20, height, fill=colours.lane, edge=colours.line, radius=10)
        self.text(24, y + 23, name, size=13, anchor="start", colour=colours.faint)

    def box(self, x: float, y: float, width: float, name: str, below: str) -> None:
        """Draw a box with a name and a line of small text."""
        self.rect(x, y, width, 52, fill=self.palette.box, edge=self.palette.edge, radius=7)
        self.text(x + width / 2, y + 22, name, weight=600)
        self.text(x + width / 2, y + 41, below, size=12, colour=self.palette.faint)

    def arrow(self, path: str, *, dashed: bool = False) -> None:
        """Draw an arrow along an SVG path."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="{path}" stroke="{self.palette.ink}" stroke-width="1.6" fill="none" '
            f'marker-end="url(#head)"{dashes}/>'
        )

    def bars(
        self, x: float, y: float, values: Sequence[float], colours: Sequence[str], high: float = 32
    ) -> None:
        """Draw one bar for each value, up or down from a line at `y`."""
        step = 180 / len(values)
        for number, (value, colour) in enumerate(zip(values, colours, strict=True)):
            size = high * abs(value)
            top = y - size if value > 0 else y
            if size:
                self.rect(x + number * step + 1.5, top, step - 3, size, fill=colour)
        self.parts.append(f'<path d="M{x:g} {y:g} h180" stroke="{self.palette.faint}"/>')

    def __str__(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} '
                f'{self.height:g}" font-family="system-ui, -apple-system, \'Segoe UI\', sans-serif"'
                f' role="img" aria-label="{escape(self.label)}">',
                '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
                'markerHeight="7" orient="auto">'
                f'<path d="M0 0 10 5 0 10z" fill="{self.palette.ink}"/></marker></defs>',
                *self.parts,
                "</svg>\n",
            ]
        )


# -- the path of a gradient ------------------------------------------------------------------------

GRADIENT = [
    0.3,
    -0.1,
    0.15,
    -0.5,
    0.1,
    0.25,
    -0.2,
    0.7,
    0.05,
    -0.3,
    0.1,
    0.2,
    -0.15,
    0.1,
    -0.25,
    0.4,
]
RESIDUAL = [0.2, -0.3, 0.6, -0.2, 0.3, -0.1, -0.1, 0.3, 0.2, -0.6, -0.2, 0.1, 0.3, -0.2, 0.1, -0.1]
OTHERS = [{2: 0.8, 5: -0.7, 9: -0.6}, {3: -0.5, 9: -0.9, 12: 0.7}]  # what two other ranks send
SENT = 3


def gradient(palette: Palette) -> Drawing:
    """Draw how a gradient becomes a message, and the messages of all ranks their mean."""
    drawing = Drawing(
        660,
        450,
        "The gradient is added to the residual; the three largest sums are sent, the rest stays in "
        "the residual; the messages of all ranks make up the mean, which the optimizer gets",
        palette,
    )
    total = [a + b for a, b in zip(GRADIENT, RESIDUAL, strict=True)]
    largest = set(sorted(range(len(total)), key=lambda n: -abs(total[n]))[:SENT])
    kept = [palette.kept] * len(total)
    left, middle, right = 15, 240, 465

    def name(x: float, y: float, words: str, below: str = "") -> None:
        drawing.text(x + 90, y, words, size=17, weight=600)
        drawing.text(x + 90, y + 21, below, size=15, colour=palette.faint)

    axis = 140
    for x, words, values in (
        (left, "gradient", GRADIENT),
        (middle, "residual", RESIDUAL),
        (right, "sum", total),
    ):
        shown = [
            RANKS[0] if values is total and n in largest else kept[n] for n in range(len(total))
        ]
        drawing.bars(x, axis, values, shown, high=52)
        name(x, 212, words, "1 accumulate, 2 select" if values is total else "")
    drawing.text(217, axis + 8, "+", size=26)
    drawing.text(442, axis + 8, "=", size=26)
    drawing.arrow("M555 80 C555 24 330 24 330 84")
    drawing.text(442, 24, "what is not sent stays for the next step", size=16)

    messages = [{n: total[n] for n in largest}, *OTHERS]
    drawing.arrow("M555 244 V284")
    _message(drawing, right, 292, messages[0], RANKS[0])
    name(right, 344, "message", "3 encode")
    drawing.arrow("M458 290 C400 288 330 276 330 226", dashed=True)
    drawing.text(322, 264, "rounding error", size=15, anchor="end", colour=palette.faint)
    drawing.arrow("M457 305 H432")
    for number, message in enumerate(messages):
        _message(drawing, middle, 292 + 34 * number, message, RANKS[number])
    name(middle, 416, "messages of all ranks", "4 communicate")

    mean = [sum(m.get(n, 0.0) for m in messages) / len(messages) for n in range(len(total))]
    drawing.arrow("M232 339 H207")
    drawing.bars(left, 339, mean, [palette.ink] * len(mean), high=52)
    name(left, 416, "mean", "5 decode, for the optimizer")
    return drawing


def _message(drawing: Drawing, x: float, y: float, entries: dict[int, float], colour: str) -> None:
    """Draw a strip with a filled cell for every coordinate that is sent."""
    palette, step = drawing.palette, 180 / len(GRADIENT)
    drawing.rect(x, y, 180, 26, fill=palette.box, edge=palette.line, radius=3)
    for place in entries:
        drawing.rect(x + place * step + 1, y + 3, step - 2, 20, fill=colour)


# -- which file does what --------------------------------------------------------------------------


def architecture(palette: Palette) -> Drawing:
    """Draw the way of a bucket through the classes of the library."""
    drawing = Drawing(
        920,
        470,
        "DDP's hook queues a bucket for the exchange thread; there a session runs an exchange, "
        "which selects from the residual, encodes a message and hands it to a collective; the "
        "collective's requests go to a driver, which talks to the other ranks",
        palette,
    )

    def note(x: float, y: float, words: str, anchor: str = "middle") -> None:
        drawing.text(x, y, words, size=12, anchor=anchor)

    drawing.lane(10, 100, "backward's thread")
    drawing.box(190, 40, 150, "DDP", "bucket is ready")
    drawing.box(430, 40, 170, "sparse_hook", "adapters/hook.py")
    drawing.box(690, 40, 200, "Pipeline.take", "adapters/pipeline.py")
    drawing.arrow("M340 66 H430")
    drawing.arrow("M600 66 H690")

    drawing.lane(125, 235, "exchange thread")
    drawing.box(690, 150, 200, "ExchangeThread", "groups/thread.py")
    drawing.box(420, 150, 190, "Session, Transaction", "session.py")
    drawing.box(190, 150, 150, "Exchange.run", "exchange.py")
    drawing.arrow("M790 92 V150")
    note(802, 121, "queue", "start")
    drawing.arrow("M690 176 H610")
    drawing.arrow("M420 176 H340")
    drawing.box(30, 255, 150, "StateStore", "state.py")
    drawing.box(220, 255, 150, "Selector.select", "selectors/, kernels/")
    drawing.box(410, 255, 150, "encode", "codecs/, layout.py")
    drawing.box(600, 255, 180, "CollectivePlan.run", "collectives/")
    drawing.arrow("M225 202 L135 255")
    note(160, 227, "residual", "end")
    drawing.arrow("M270 202 L290 255")
    note(292, 229, "1 accumulate, 2 select", "start")
    drawing.arrow("M370 281 H410")
    drawing.arrow("M560 281 H600")
    note(485, 247, "3 encode")
    note(690, 247, "4 communicate, 5 decode")
    drawing.arrow("M485 307 C485 350 105 350 105 309")
    note(295, 354, "the quantization error is put back")

    drawing.lane(375, 85, "driver")
    drawing.box(600, 397, 150, "drive", "groups/")
    drawing.box(795, 397, 110, "other ranks", "network")
    drawing.arrow("M655 307 V397")
    note(647, 345, "Request", "end")
    drawing.arrow("M700 397 V307")
    note(708, 345, "answers", "start")
    drawing.arrow("M750 415 H795")
    drawing.arrow("M795 432 H750")
    return drawing


# -- where the time of a step goes -----------------------------------------------------------------

STEP = ROOT / "benchmarks" / "results" / "step" / "results.json"
SHOWN = {
    "compute alone": "compute alone",
    "dense DDP": "dense DDP",
    "PowerSGD rank 1": "PowerSGD, rank 1",
    "TopK(0.01)": "TopK(0.01)",
}


def step(palette: Palette) -> Drawing:
    """Draw the parts of a training step at 1 Gbit/s, as `make bench-step` measured them."""
    results = json.loads(STEP.read_text())
    (run,) = (run for run in results["runs"] if run["rate"] == 1e9)
    rows = {one["name"]: _parts(one["samples"]) for one in run["contenders"]}
    rows = {name: rows[name] for name in SHOWN}
    used = [part for part in OF_PARTS if any(parts[part] > 0.01 for parts in rows.values())]
    seconds = {name: sum(parts.values()) for name, parts in rows.items()}
    drawing = Drawing(
        660,
        76 + 46 * len(SHOWN),
        "At 1 Gbit/s a step takes "
        + ", ".join(f"{seconds[name]:.2f} s with {said}" for name, said in SHOWN.items()),
        palette,
    )
    hosts = results.get("hosts") or run["hosts"]
    title = f"Where the time of a step goes: {hosts} hosts at 1 Gbit/s"
    drawing.text(0, 20, title, size=17, weight=600, anchor="start")
    at = 0.0
    for part in used:
        drawing.rect(at, 39, 13, 13, fill=OF_PARTS[part])
        drawing.text(at + 19, 51, part, size=15, anchor="start")
        at += 36 + 8.2 * len(part)
    left, scale = 150, 430 / max(seconds.values())
    for number, (name, said) in enumerate(SHOWN.items()):
        y, weight = 78 + 46 * number, 600 if name.startswith("TopK") else 400
        drawing.text(left - 10, y + 21, said, size=15, anchor="end", weight=weight)
        x = float(left)
        for part in used:
            drawing.rect(x, y, scale * rows[name][part], 30, fill=OF_PARTS[part])
            x += scale * rows[name][part]
        words = f"{seconds[name]:.2f} s"
        drawing.text(x + 8, y + 21, words, size=15, anchor="start", weight=weight)
    floor = left + scale * seconds["compute alone"]
    drawing.parts.append(
        f'<path d="M{floor:.2f} 70 V{70 + 46 * len(SHOWN):g}" stroke="{palette.ink}" '
        'stroke-dasharray="4 3"/>'
    )
    return drawing


def _parts(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of each part of the median step, split as the mean step is."""
    median = statistics.median(sample["seconds"] for sample in samples)
    mean = statistics.fmean(sample["seconds"] for sample in samples)
    return {
        part: median / mean * statistics.fmean(sample["parts"][part] for sample in samples)
        for part in OF_PARTS
    }


PICTURES: dict[str, Callable[[Palette], Drawing]] = {
    "architecture": architecture,
    "gradient": gradient,
    "step": step,
}


# -- measured pictures on dark pages ---------------------------------------------------------------

PAGES = ("README.md", "docs/*.md", "papers/*/README.md")
_DARK = re.compile(r'srcset="([^"]+)-dark\.svg"')
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")


def measured() -> list[Path]:
    """Return the measured pictures that a page shows in a dark version, as light SVG files."""
    pages = (page for pattern in PAGES for page in ROOT.glob(pattern))
    shown = {
        (page.parent / f"{name}.svg").resolve()
        for page in pages
        for name in _DARK.findall(page.read_text())
    }
    return sorted(path for path in shown if path.parent != IMAGES)


def on_dark(svg: str) -> str:
    """Return a measured picture in the colours of a dark page, without a background.

    Bars keep the colours of their parts, some of which are also colours of lines.
    """
    colours = {"#ffffff": "none", INK: DARK.ink, FAINT: DARK.line, "#000000": DARK.ink}
    if OF_PARTS["encode"].lower() not in svg:
        colours |= {line.lower(): dark for line, dark in zip(OF_LINES, LINES_ON_DARK, strict=True)}
    svg = _COLOUR.sub(lambda found: colours.get(found[0], found[0]), svg)
    return svg.replace("<svg ", f'<svg fill="{DARK.ink}" ', 1)  # matplotlib leaves black out


def files() -> Iterator[tuple[Path, str]]:
    """All pictures, with their text."""
    for name, draw in PICTURES.items():
        yield IMAGES / f"{name}.svg", str(draw(LIGHT))
        yield IMAGES / f"{name}-dark.svg", str(draw(DARK))
    for path in measured():
        yield path.with_name(f"{path.stem}-dark.svg"), on_dark(path.read_text())


if __name__ == "__main__":
    for path, text in files():
        path.write_text(text)
        print(path.relative_to(ROOT))
