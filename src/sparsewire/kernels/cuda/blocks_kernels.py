"""Squared norms of blocks, in one pass over the gradient."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def add_squares(
    before,
    addend,
    starts,
    stops,
    norms,
    count,
    HAS_BEFORE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Sum the squares of some blocks by halves, as in `reference`.

    Reads before and addend once.
    """
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.load(starts + block, mask=block < count, other=0)
    stop = tl.load(stops + block, mask=block < count, other=0)
    places = start[:, None] + tl.arange(0, WIDTH)[None, :]
    inside = places < stop[:, None]
    total = tl.load(addend + places, mask=inside, other=0).to(tl.float32)
    if HAS_BEFORE:
        total = tl.load(before + places, mask=inside, other=0) + total
    total = total * total
    for step in tl.static_range(1, STEPS + 1):
        total = tl.sum(tl.reshape(total, [ROWS, 2, WIDTH >> step]), 1)
    tl.store(norms + block, tl.reshape(total, [ROWS]), mask=block < count)
