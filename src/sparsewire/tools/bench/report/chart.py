"""Pictures: lines and bars as a file, and inside a report, where points show their values.

A `Chart` has panels with lines. In a file it has a legend; in a report it is drawn twice, for wide
and for narrow screens, with invisible circles that carry the values of its points.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from .. import drawing
from ..drawing import FAINT, INK, MARKERS, OF_LINES, OF_PARTS
from . import Bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES: dict[str, dict[str, Any]] = {
    "solid": {"linewidth": 1.7, "markersize": 4.5},
    "dashed": {"linewidth": 1.2, "linestyle": (0, (4, 2)), "marker": ""},
    "tick": {"linestyle": "none", "marker": "_", "markersize": 9},
}
_WIDE, _NARROW = 10.0, 4.0  # inches
_IDS = re.compile(r' id="(?!m|p[0-9a-f])[^"]*"')  # that nothing refers to
_POINTS = 72  # in an inch


@dataclass(frozen=True)
class Series:
    """One line of a panel; `told` has the value of each point in words.

    Series of the same name share a colour, given by `number`, and are hidden together.
    """

    name: str
    number: int
    xs: Sequence[float]
    ys: Sequence[float]
    told: Sequence[str] = ()
    style: str = "solid"
    ends_in_ring: bool = False
    told_in_legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Args:
        title: the quantity shown, with its unit.
        below: the quantity on the horizontal axis.
        series: the lines, the last on top.
        heights: the range of the vertical axis.
        target: a height to mark, and its name.
        ticks: where the horizontal axis has ticks, if it does not begin at zero.
        say: a height in words, which makes both axes logarithmic.
    """

    title: str
    below: str
    series: tuple[Series, ...]
    heights: tuple[float, float] | None = None
    target: tuple[float, str] | None = None
    ticks: tuple[int, ...] = ()
    say: Callable[[float], str] | None = None


@dataclass(frozen=True)
class Chart:
    """Panels beside each other; `label` describes them, `styles` explains the kinds of lines."""

    label: str
    panels: tuple[Panel, ...]
    styles: tuple[tuple[str, str], ...] = ()
    template = "chart.html"

    @property
    def names(self) -> list[tuple[str, int]]:
        """The names of the lines, each with the number of its colour."""
        return list(dict.fromkeys((s.name, s.number) for p in self.panels for s in p.series))

    @property
    def wide(self) -> Markup:
        """The chart for wide screens."""
        return _inline(self, _WIDE)

    @property
    def narrow(self) -> Markup:
        """The chart for phones."""
        return _inline(self, _NARROW)


def draw(chart: Chart) -> Figure:
    """Draw a chart with a legend."""
    figure = _draw(chart, _WIDE, dpi=150)
    figure.set_figheight(figure.get_figheight() + 0.25 * len(chart.names))
    figure.legend(
        handles=_legend(chart, figure),
        loc="outside lower left",
        ncols=2 if len(chart.panels) > 1 else 1,
        frameon=False,
        labelcolor=INK,
        fontsize=9,
    )
    return figure


def draw_bars(title: str, many: Sequence[Bars]) -> Figure:
    """Draw bars below each other."""
    heights = [len(bars.bars) * 0.36 + 0.9 for bars in many]
    figure = drawing.blank(_WIDE, sum(heights) + 0.9)
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for bars, axes in zip(many, panels, strict=True):
        _draw_rows(axes, bars)
    from matplotlib.patches import Patch

    used = list(dict.fromkeys(part for bars in many for part in bars.parts))
    figure.legend(
        handles=[Patch(color=OF_PARTS[part], label=part) for part in used],
        loc="outside upper left",
        ncols=len(used),
        frameon=False,
        handlelength=0.9,
        handleheight=0.9,
        columnspacing=1.2,
        labelcolor=INK,
        fontsize=9,
        title=title,
        title_fontproperties={"weight": "bold", "size": 11},
        alignment="left",
    )
    return figure


def _draw(chart: Chart, width: float, dpi: int) -> Figure:
    """Draw all panels beside each other, or below each other on a narrow figure."""
    count, is_narrow = len(chart.panels), width <= _NARROW
    figure = drawing.blank(width, 3.6 * count if is_narrow else 4.6)
    figure.set_dpi(dpi)
    shape = (count, 1) if is_narrow else (1, count)
    for number, (panel, axes) in enumerate(
        zip(chart.panels, figure.subplots(*shape, squeeze=False).flat, strict=True)
    ):
        for line, series in enumerate(panel.series):
            _draw_line(axes, series, gid=f"s{number}.{line}")
        _finish(axes, panel, letters=40 if is_narrow else 90 // count)
    return figure


def _draw_line(axes: Axes, series: Series, gid: str) -> None:
    colour = OF_LINES[series.number % len(OF_LINES)]
    marker = MARKERS[series.number % len(MARKERS)]
    style = {"marker": marker, **STYLES[series.style]}
    axes.plot(series.xs, series.ys, color=colour, gid=gid, **style)
    if series.ends_in_ring:
        end = series.xs[-1:], series.ys[-1:]
        axes.plot(*end, "o", color=colour, ms=12, fillstyle="none", gid=f"{gid}.ring")


def _finish(axes: Axes, panel: Panel, letters: int) -> None:
    if panel.say is not None:
        _make_logarithmic(axes, panel.ticks, panel.say)
    elif panel.ticks:
        axes.set_xticks(panel.ticks)
    else:
        axes.set_xlim(left=0)
    if panel.heights is not None:
        axes.set_ylim(panel.heights)
    if panel.target is not None:
        height, told = panel.target
        axes.axhline(height, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.annotate(
            told,
            (0, height),
            (5, 4),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=INK,
            fontsize=9,
        )
    drawing.plain(axes, textwrap.fill(panel.title, letters), panel.below)


def _make_logarithmic(axes: Axes, ticks: Sequence[int], say: Callable[[float], str]) -> None:
    """Scale both axes logarithmically, with ticks that can be read."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    def short(value: float, place: int | None) -> str:
        number, _, unit = say(value).partition(" ")
        return f"{float(number):g} {unit}"

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 500 else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(short))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(which="minor", axis="y", color=FAINT, linewidth=0.4)


def _legend(chart: Chart, figure: Figure) -> list[Any]:
    """Return the handles of the legend: colours first, then kinds of lines."""
    from matplotlib.lines import Line2D

    told = {s.name: s.told_in_legend or s.name for p in chart.panels for s in p.series}
    handles = []
    for name, number in chart.names:
        style = {"marker": MARKERS[number % len(MARKERS)], **STYLES["solid"]}
        colour = OF_LINES[number % len(OF_LINES)]
        handles.append(Line2D([], [], color=colour, label=told[name], **style))
    for kind, text in chart.styles:
        handles.append(Line2D([], [], color=INK, label=text, **STYLES[kind]))
    return handles


def _draw_rows(axes: Axes, bars: Bars) -> None:
    unit, factor = ("s", 1.0) if bars.largest >= 1 else ("ms", 1000.0)
    for row, bar in enumerate(bars.bars):
        left = 0.0
        for part in bar.parts:
            width = factor * part.value
            axes.barh(row, width, 0.72, left, color=OF_PARTS[part.name], linewidth=0)
            left += width
        low, high = factor * bar.low, factor * bar.high
        axes.plot([low, high], [row, row], color=INK, linewidth=1.2, solid_capstyle="butt")
        axes.annotate(
            f"{bar.told}  {bar.verdict}",
            (max(left, high), row),
            (6, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=9,
        )
    if bars.floor is not None:
        axes.axvline(factor * bars.floor, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xlim(0, factor * bars.largest * 1.3)  # room for the labels
    axes.set_ylim(len(bars.bars) - 0.4, -0.6)
    axes.set_yticks(range(len(bars.bars)), [bar.name.replace("), ", "),\n") for bar in bars.bars])
    drawing.plain(axes, f"{bars.title}, {unit}", "")
    axes.grid(visible=False, axis="y")


def _inline(chart: Chart, width: float) -> Markup:
    """Return the chart as inline SVG, in the colours and fonts of the page."""
    figure = _draw(chart, width, dpi=_POINTS)
    drawing.settle(figure)
    circles = "".join(_circles(chart, figure))
    text = _svg(figure, f"sparsewire {width}")
    for number, panel in enumerate(chart.panels):
        for line, series in enumerate(panel.series):
            for gid in (f"s{number}.{line}", f"s{number}.{line}.ring"):
                text = text.replace(f'id="{gid}"', f'data-series="{escape(series.name)}"')
    text = _IDS.sub("", text)
    for number, colour in enumerate(OF_LINES):
        text = re.sub(colour, f"var(--line-{number})", text, flags=re.IGNORECASE)
    text = text.replace(INK, "currentColor").replace(FAINT, "var(--line)")
    text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(chart.label)}" ', 1)
    return Markup(text.replace("</svg>", f"{circles}</svg>"))  # names are escaped


def _svg(figure: Figure, salt: str) -> str:
    import matplotlib

    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    return text[text.index("<svg") :]


def _circles(chart: Chart, figure: Figure) -> list[str]:
    """Return an invisible circle for each point that lies inside its axes."""
    top, found = figure.get_figheight() * _POINTS, []
    for panel, axes in zip(chart.panels, figure.axes, strict=True):
        for series in panel.series:
            for x, y, told in zip(series.xs, series.ys, series.told, strict=False):
                across, up = axes.transData.transform((x, y))
                if axes.bbox.contains(across, up):
                    found.append(
                        f'<circle cx="{across:.1f}" cy="{top - up:.1f}" r="4" '
                        f'data-series="{escape(series.name)}" data-tip="{escape(told)}"/>'
                    )
    return found
