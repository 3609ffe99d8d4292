"""The picture of a measurement over sizes: bytes and time of a step against the number of hosts.

Both scales are logarithmic. What was measured is solid, what is worked out or modelled is dashed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sparsewire.report import human_bytes

from .. import drawing
from ..colours import FAINT, INK, MARKERS, OF_LINES
from ..contenders import COMPUTE
from ..results import say_seconds
from .results import Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DASHED = (0, (4, 2))


def save(scale: Scale, *paths: Path) -> None:
    """Draw `scale` and write it in the formats that the names of `paths` end in."""
    drawing.write(draw(scale), *paths)


def draw(scale: Scale) -> Figure:
    """Two panels: bytes received, and time."""
    figure = drawing.blank(12, 6)
    received, seconds = figure.subplots(1, 2)
    for number, name in enumerate(scale.names):
        colour, marker = OF_LINES[number % len(OF_LINES)], MARKERS[number % len(MARKERS)]
        measured, doublings = scale.measured(name), scale.doublings
        solid = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.8}
        dashed = {"color": colour, "linestyle": _DASHED, "linewidth": 1.2}
        received.plot(doublings, [scale.received(name, w) for w in doublings], **dashed)
        received.plot(list(measured), [one.payload for one in measured.values()], **solid)
        seconds.plot(doublings, [scale.modelled(name, w) for w in doublings], **dashed)
        seconds.plot(list(measured), [one.median for one in measured.values()], label=name, **solid)
        checks = [one for one in scale.checked if one.name == name]
        seconds.plot(
            [one.hosts for one in checks],
            [one.modelled for one in checks],
            color=colour,
            marker="_",
            markersize=9,
            linestyle="none",
        )
    floor = {hosts: run.floor.median for hosts, run in scale.runs}
    plain = {"color": "#999999", "linewidth": 1.2}
    seconds.plot(scale.doublings, [scale.alone] * len(scale.doublings), linestyle=_DASHED, **plain)
    seconds.plot(list(floor), list(floor.values()), marker=".", label=COMPUTE, **plain)
    _finish(received, scale, "Received per host and step", human_bytes)
    _finish(seconds, scale, f"Time of a step {scale.place}", say_seconds)
    _explain(figure, seconds)
    return figure


def _explain(figure: Figure, axes: Axes) -> None:
    """Say what colours and lines mean, in one legend, whose entries never lie on each other."""
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=INK, linewidth=1.8, label="measured, on hosts that share cores"),
        Line2D(
            [],
            [],
            color=INK,
            linewidth=1.2,
            linestyle=_DASHED,
            label="formula (bytes) or model (time), on hosts with cores of their own",
        ),
        Line2D(
            [],
            [],
            color=INK,
            marker="_",
            markersize=9,
            linestyle="none",
            label="model, cores shared as measured",
        ),
    ]
    figure.legend(
        handles=[*axes.get_legend_handles_labels()[0], *lines],
        loc="outside lower left",
        ncols=2,
        frameon=False,
        labelcolor=INK,
        fontsize=9,
    )


def _finish(axes: Axes, scale: Scale, title: str, say: Callable[[float], str]) -> None:
    """Logarithmic scales whose ticks can be read."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [hosts for hosts in scale.doublings if hosts.bit_length() % 2 == 0 or hosts == 2]
    axes.set_xticks(ticks, [str(hosts) for hosts in ticks])
    low, high = axes.get_ylim()
    between = (1.0, 2.0, 5.0) if high / low < 500 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=between))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(say(value))))
    axes.yaxis.set_minor_formatter(NullFormatter())
    drawing.plain(axes, title, "hosts")
    axes.grid(which="minor", axis="y", color=FAINT, linewidth=0.4)


def _short(text: str) -> str:
    """Without zeros behind the point."""
    number, _, unit = text.partition(" ")
    return f"{float(number):g} {unit}"
