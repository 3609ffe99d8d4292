"""Shared by all pictures, here and in `papers/`: their colours, size, axes and files.

The colours are Okabe and Ito's, told apart by all common colour vision.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OF_PARTS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "select": "#009E73",
    "encode": "#F0E442",
    "exchange": "#D55E00",
    "decode": "#E69F00",
    "wait": "#999999",
    "optimizer": "#CC79A7",
}
INK, FAINT = "#333333", "#e4e4e4"
OF_LINES = ("#111111", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B87E00", "#56B4E9")
LINES_ON_DARK = ("#e8eaed", "#56B4E9", "#F2884B", "#2EC59A", "#E3A0C8", "#E0B445", "#A9D8F4")
MARKERS = "osD^vPX"


def blank(width: float, height: float) -> Figure:
    """Return an empty picture, in inches."""
    from matplotlib.figure import Figure  # takes 0.6 s, and only a finished measurement needs it

    figure = Figure(figsize=(width, height), dpi=150)
    figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.15)
    return figure


def plain(axes: Axes, title: str, below: str) -> None:
    """Label the axes, and hide lines and ticks that carry no information."""
    axes.set_title(title, loc="left", color=INK, fontsize=10, fontweight="bold", pad=12)
    axes.set_xlabel(below, color=INK, fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(which="both", colors=INK, length=0, labelsize=9)
    axes.set_axisbelow(True)
    axes.grid(color=FAINT)


def settle(figure: Figure) -> None:
    """Compute the layout, which is then the same in every format."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def write(figure: Figure, *paths: Path) -> None:
    """Write the formats that the names of `paths` end in, the same file from the same data."""
    import matplotlib

    settle(figure)
    with matplotlib.rc_context({"svg.hashsalt": "sparsewire"}):
        for path in paths:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})
