"""The picture of a measurement: a bar for each contender, made of the parts of its median step.

One panel for each network. Bars carry their numbers themselves; compute alone, which nobody can be
faster than, is a line through all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .colours import FAINT, INK, OF_PARTS
from .results import Results, Run, say_seconds
from .stopwatch import PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW = 0.36  # inches


def save(results: Results, *paths: Path) -> None:
    """Draw `results` and write them in the formats that the names of `paths` end in."""
    import matplotlib  # takes 0.6 s, and only a finished measurement needs it
    from matplotlib.figure import Figure

    heights = [len(run.contenders) * _ROW + 0.9 for run in results.runs]
    figure = Figure(figsize=(10, sum(heights) + 0.9), dpi=150)
    figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.15, hspace=0.04)
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for run, axes in zip(results.runs, panels, strict=True):
        _draw(axes, results, run)
    _name_parts(figure, results)
    with matplotlib.rc_context({"svg.hashsalt": "sparsewire"}):  # the same file from the same data
        for path in paths:
            plain = {"Date": None} if path.suffix == ".svg" else {}
            figure.savefig(path, metadata=plain)


def _name_parts(figure: Figure, results: Results) -> None:
    """What the colours mean, in the order in which they follow each other."""
    used = [
        part
        for part in PARTS
        if any(one.parts[part] > 0 for run in results.runs for one in run.finished)
    ]
    from matplotlib.patches import Patch

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
        title=f"{results.model['name']}, {results.hosts} hosts: "
        "where the time of a training step goes",
        title_fontproperties={"weight": "bold", "size": 11},
        alignment="left",
    )


def _draw(axes: Axes, results: Results, run: Run) -> None:
    largest = max(max(one.median, one.quartiles[1]) for one in run.finished)
    unit, factor = ("s", 1.0) if largest >= 1 else ("ms", 1000.0)
    for row, one in enumerate(run.contenders):
        if one in run.failed:
            axes.annotate("failed", (0, row), (4, 0), textcoords="offset points", va="center")
            continue
        left = 0.0
        for part in PARTS:
            width = factor * one.parts[part]
            axes.barh(row, width, 0.72, left, color=OF_PARTS[part], linewidth=0)
            left += width
        low, high = (factor * quartile for quartile in one.quartiles)
        axes.plot([low, high], [row, row], color=INK, linewidth=1.2, solid_capstyle="butt")
        axes.annotate(
            f"{say_seconds(one.median, largest)}  {run.against_dense(one)}",
            (max(factor * one.median, high), row),
            (6, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=9,
        )
    axes.axvline(factor * run.floor.median, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xlim(0, factor * largest * 1.3)  # room for the labels
    axes.set_ylim(len(run.contenders) - 0.4, -0.6)
    axes.set_yticks(
        range(len(run.contenders)), [one.name.replace("), ", "),\n") for one in run.contenders]
    )
    place = run.place[0].upper() + run.place[1:]
    against = ", against dense DDP" if run.dense else ""
    axes.set_title(f"{place}: {unit} per step{against}", loc="left", color=INK, fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=FAINT)
