"""Random coordinates of every segment: the draws defined by `reference`, in parallel."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .columns import (
    DRAW_COLUMNS,
    DRAW_FIRST,
    DRAW_SEGMENT,
    GROUP_COLUMNS,
    GROUP_FIRST,
    GROUP_SEGMENT,
    GROUP_TILE,
    GROUP_TILES,
    SEGMENT_COLUMNS,
    SEGMENT_COUNT,
    SEGMENT_KEY,
    SEGMENT_LENGTH,
    SEGMENT_SLOT,
    SEGMENT_START,
    SEGMENT_WANTED,
    TILE_COLUMNS,
    TILE_START,
    TILE_STOP,
)
from .device import below, count_before, mix, popcount


@triton.jit
def draw_marks(bitmap, begin, length, stream, number, takes_part):
    """Mark the coordinates of some draws. Return how many were not marked before."""
    at = begin + below(mix(stream + number), length)
    bits = (1 << (at % 32)).to(tl.int32)
    old = tl.atomic_or(bitmap + at // 32, bits, mask=takes_part, sem="relaxed")
    return tl.sum((takes_part & (old & bits == 0)).to(tl.int64))


@triton.jit
def progress(found, segment, segment_count, wanted, ROUND: tl.constexpr):
    """Return how many coordinates a round has yet to draw, and the number of draws before it."""
    missing = wanted
    drawn = tl.zeros_like(wanted)
    for number in tl.static_range(ROUND):
        drawn += missing
        missing -= tl.load(found + number * segment_count + segment)
    return missing, drawn


@triton.jit(do_not_specialize=["key", "segment_count"])
def draw_round(
    bitmap,
    found,
    segments,
    draws,
    key: tl.int64,
    segment_count,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make one block of a round's draws, as many per segment as are missing."""
    block = tl.program_id(0)
    segment = tl.load(draws + block * DRAW_COLUMNS + DRAW_SEGMENT)
    first = tl.load(draws + block * DRAW_COLUMNS + DRAW_FIRST)
    wanted = tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_WANTED)
    missing, drawn = progress(found, segment, segment_count, wanted, ROUND)
    if first < missing:
        number = first + tl.arange(0, BLOCK)
        stream = mix(tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_KEY) ^ key) + drawn
        begin = tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_START)
        length = tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_LENGTH)
        fresh = draw_marks(bitmap, begin, length, stream, number, number < missing)
        tl.atomic_add(found + ROUND * segment_count + segment, fresh, sem="relaxed")


@triton.jit(do_not_specialize=["key", "segment_count"])
def draw_rest(
    bitmap,
    found,
    segments,
    key: tl.int64,
    segment_count,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run all further rounds of one segment."""
    segment = tl.program_id(0).to(tl.int64)
    wanted = tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_WANTED)
    missing, drawn = progress(found, segment, segment_count, wanted, ROUND)
    stream = mix(tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_KEY) ^ key)
    begin = tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_START)
    length = tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_LENGTH)
    while missing > 0:
        fresh = tl.zeros_like(missing)
        for first in range(0, missing, BLOCK):
            number = first + tl.arange(0, BLOCK)
            takes_part = number < missing
            fresh += draw_marks(bitmap, begin, length, stream + drawn, number, takes_part)
        drawn += missing
        missing -= fresh


@triton.jit
def drawn_words(bitmap, tiles, groups, segments, group, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Return a group's words with only its segment's bits, inverted if unchosen ones were drawn."""
    WORDS: tl.constexpr = TILE // 32
    lanes = tl.arange(0, GROUP * WORDS)
    first = tl.load(groups + group * GROUP_COLUMNS + GROUP_TILE)
    live = lanes < tl.load(groups + group * GROUP_COLUMNS + GROUP_TILES) * WORDS
    segment = tl.load(groups + group * GROUP_COLUMNS + GROUP_SEGMENT)
    turned = tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_WANTED) < tl.load(
        segments + segment * SEGMENT_COLUMNS + SEGMENT_COUNT
    )
    tile = first + lanes // WORDS
    start = tl.load(tiles + tile * TILE_COLUMNS + TILE_START, mask=live, other=0)
    stop = tl.load(tiles + tile * TILE_COLUMNS + TILE_STOP, mask=live, other=0)
    base = start // TILE * TILE + (lanes % WORDS) * 32
    low = tl.minimum(tl.maximum(start - base, 0), 32)
    high = tl.minimum(tl.maximum(stop - base, 0), 32)
    one = tl.full(lanes.shape, 1, tl.int64)
    inside = ((one << high) - (one << tl.minimum(low, high))).to(tl.int32)
    words = tl.load(bitmap + base // 32, mask=live & (inside != 0), other=0)
    return tl.where(turned, ~words, words) & inside, base


@triton.jit
def count_drawn(bitmap, tiles, groups, segments, counts, TILE: tl.constexpr, GROUP: tl.constexpr):
    group = tl.program_id(0)
    words, _ = drawn_words(bitmap, tiles, groups, segments, group, TILE, GROUP)
    tl.store(counts + group, tl.sum(popcount(words)).to(tl.int64))


@triton.jit(do_not_specialize=["capacity"])
def write_drawn(
    bitmap,
    tiles,
    groups,
    segments,
    counts,
    indices,
    capacity,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write the marked coordinates of one group, ascending."""
    group = tl.program_id(0)
    words, base = drawn_words(bitmap, tiles, groups, segments, group, TILE, GROUP)
    segment = tl.load(groups + group * GROUP_COLUMNS + GROUP_SEGMENT)
    slot = tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_SLOT)
    slot += count_before(counts, tl.load(groups + group * GROUP_COLUMNS + GROUP_FIRST), group, 1024)
    many = popcount(words)
    at = slot + tl.cumsum(many, 0) - many
    for _ in range(tl.max(many)):
        lowest = words & -words
        is_set = lowest != 0
        tl.store(indices + at, base + popcount(lowest - 1), mask=is_set & (at < capacity))
        at += is_set.to(tl.int64)
        words = words ^ lowest


@triton.jit(do_not_specialize=["key"])
def write_runs(segments, draws, indices, key: tl.int64, BLOCK: tl.constexpr):
    """Write one block of a segment's run, which has a random start and wraps around."""
    block = tl.program_id(0)
    segment = tl.load(draws + block * DRAW_COLUMNS + DRAW_SEGMENT)
    place = tl.load(draws + block * DRAW_COLUMNS + DRAW_FIRST) + tl.arange(0, BLOCK)
    start = tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_START)
    length = tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_LENGTH)
    count = tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_COUNT)
    begin = below(mix(tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_KEY) ^ key), length)
    wrapped = tl.maximum(begin + count - length, 0)
    inside = tl.where(place < wrapped, place, begin + place - wrapped)
    slot = tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_SLOT)
    tl.store(indices + slot + place, start + inside, mask=place < count)
