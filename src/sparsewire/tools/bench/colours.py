"""The colours of pictures and pages: Okabe and Ito's, told apart by all common colour vision."""

from __future__ import annotations

from .stopwatch import PARTS

OF_PARTS = dict(
    zip(
        PARTS,
        (
            "#56B4E9",  # forward
            "#0072B2",  # backward
            "#009E73",  # select
            "#F0E442",  # encode
            "#D55E00",  # exchange
            "#E69F00",  # decode
            "#999999",  # wait
            "#CC79A7",  # optimizer
        ),
        strict=True,
    )
)
INK, FAINT = "#333333", "#e4e4e4"
OF_LINES = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B87E00", "#56B4E9")
MARKERS = "osD^vPX"
