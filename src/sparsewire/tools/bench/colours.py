"""The colours of pictures and reports: Okabe and Ito's, told apart by all common colour vision."""

from __future__ import annotations

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
