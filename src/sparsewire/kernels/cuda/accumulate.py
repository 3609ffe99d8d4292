"""Accumulation, which lists the entries that reach their segment's floor; plain gathers."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .columns import (
    FLOOR,
    LISTED_COUNT,
    PART_COLUMNS,
    PART_FIRST,
    PART_LENGTH,
    SPILLED,
    TILE_COLUMNS,
    TILE_PLACE,
    TILE_SEGMENT,
    TILE_START,
    TILE_STOP,
)
from .device import magnitude, popcount


@triton.jit(do_not_specialize=["entries", "list_capacity", "limit"])
def accumulate(
    before,
    addend,
    after,
    values,
    tiles,
    state,
    listed,
    parts,
    cursor,
    squares,
    non_finite,
    entries,
    list_capacity,
    limit,
    HAS_BEFORE: tl.constexpr,
    LISTS: tl.constexpr,
    TILE: tl.constexpr,
    STATE: tl.constexpr,
):
    """Accumulate one tile; see `deposit_tile`. Unmasked loads are 16 bytes wide.

    Reads before and addend once, and writes after once and 8 bytes for every listed entry.
    """
    tile = tl.program_id(0)
    start = tl.load(tiles + tile * TILE_COLUMNS + TILE_START)
    stop = tl.load(tiles + tile * TILE_COLUMNS + TILE_STOP)
    segment = tl.load(tiles + tile * TILE_COLUMNS + TILE_SEGMENT)
    place = entries + tl.load(tiles + tile * TILE_COLUMNS + TILE_PLACE)
    # fmt: off
    if (stop - start == TILE) & ((segment >= 0) | (place % 4 == 0)):
        deposit_tile(
            before, addend, after, values, tiles, state, listed, parts, cursor, squares, non_finite,
            list_capacity, limit, tile, start, stop, segment, place, True,
            HAS_BEFORE, LISTS, False, TILE, STATE,
        )
    else:
        deposit_tile(
            before, addend, after, values, tiles, state, listed, parts, cursor, squares, non_finite,
            list_capacity, limit, tile, start, stop, segment, place, False,
            HAS_BEFORE, LISTS, False, TILE, STATE,
        )
    # fmt: on


# fmt: off
@triton.jit
def list_hits(
    after, here, listed, parts, cursor, list_capacity, limit, tile, inner, bits, total, hits,
    RETRIES: tl.constexpr,
):
    """Write a tile's part of the list: values and positions, ascending."""
    # fmt: on
    marks = tl.sum(tl.where(hits, 1 << bits[None, :], 0), 1)
    many = popcount(marks)
    count = tl.sum(many)
    first = tl.atomic_add(cursor, count, sem="relaxed")
    tl.atomic_add(here + LISTED_COUNT, count.to(tl.int64), sem="relaxed")
    lower = popcount(marks[:, None] & ((1 << bits) - 1)[None, :])
    at = first + (tl.cumsum(many, 0) - many)[:, None] + lower
    # Scattered stores would first move values and pointers through shared memory. The hint that
    # four are adjacent and aligned prevents that. The mask, whose contents the compiler does not
    # know, prevents it from really merging the four stores.
    to = tl.multiple_of(tl.max_contiguous(listed + at, [1, 4]), [1, 16])
    fits = hits & (at >= 0) & (at < limit)  # the cursor may have wrapped around
    tl.store(to, total.to(tl.int32, bitcast=True), mask=fits)
    to = tl.multiple_of(tl.max_contiguous(listed + 2 * list_capacity + at, [1, 4]), [1, 16])
    tl.store(to, inner, mask=fits)
    has_room = (first >= 0) & (first + count <= limit)
    tl.store(parts + tile * PART_COLUMNS + PART_FIRST, first)
    tl.store(parts + tile * PART_COLUMNS + PART_LENGTH, tl.where(has_room, count, 0))
    if (count > 0) & (has_room == 0):  # the segment counts as missed
        tl.store(here + SPILLED, 1)
        if RETRIES:
            tl.store(after + inner, total, mask=hits)


@triton.jit
def deposit_tile(
    before,
    addend,
    after,
    values,
    tiles,
    state,
    listed,
    parts,
    cursor,
    squares,
    non_finite,
    list_capacity,
    limit,
    tile,
    start,
    stop,
    segment,
    place,
    IS_FULL: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    LISTS: tl.constexpr,
    RETRIES: tl.constexpr,
    TILE: tl.constexpr,
    STATE: tl.constexpr,
):
    """Write after = before + addend, and move entries that reach the segment's floor to the list.

    Most of them are extracted in the end and the rest is put back, which takes far fewer scattered
    writes than extracting all of them later. Each tile's part of the list is ascending, but the
    parts are in any order. Dense segments are written to `values` and leave zeros.
    """
    words = tl.arange(0, TILE // 32)
    bits = tl.arange(0, 32)
    inner = words[:, None] * 32 + bits[None, :]
    base = start // TILE * TILE
    addend += base
    before += base
    after += base
    if IS_FULL:
        added = tl.load(addend + inner).to(tl.float32)
        total = added
        if HAS_BEFORE:
            total = tl.load(before + inner) + added
    else:
        inside = (inner >= (start - base).to(tl.int32)) & (inner < (stop - base).to(tl.int32))
        added = tl.load(addend + inner, mask=inside, other=0).to(tl.float32)
        total = added
        if HAS_BEFORE:
            total = tl.load(before + inner, mask=inside, other=0) + added
    sizes = magnitude(total)
    hits = sizes < 0
    kept = total
    if LISTS:
        here = state + tl.maximum(segment, 0) * STATE
        floor = tl.load(here + FLOOR).to(tl.int32)
        hits = sizes >= tl.where(segment < 0, 0x7FFFFFFF, floor)  # at least 1, so none outside
        kept = tl.where(hits, 0.0, total)
    if segment < 0:
        kept = tl.zeros_like(total)
        to = values + tl.multiple_of(place - start + base, 4) + inner  # a hint as in `list_hits`
        if IS_FULL:
            tl.store(to, total)
        else:
            tl.store(to, total, mask=inside)
    if IS_FULL:
        tl.store(after + inner, kept)
    else:
        tl.store(after + inner, kept, mask=inside)
    tl.store(squares + tile, tl.sum(added * added))
    tl.store(non_finite + tile, (tl.max(sizes) >= 0x7F800000).to(tl.int32))
    if LISTS:
        # fmt: off
        list_hits(
            after, here, listed, parts, cursor, list_capacity, limit, tile, inner, bits, total,
            hits, RETRIES,
        )
        # fmt: on


@triton.jit
def inspect(number, param_tiles, squares, non_finite, param_squares, param_non_finite, param_count):
    """Sum the squares of one parameter's tiles.

    The program after the last parameter finds the first parameter that is not finite.
    """
    LANES: tl.constexpr = 2048
    lanes = tl.arange(0, LANES)
    if number < param_count:
        first = tl.load(param_tiles + number)
        last = tl.load(param_tiles + number + 1)
        found = tl.zeros([LANES], tl.float64)
        for at in range(first, last, LANES):
            found += tl.load(squares + at + lanes, mask=at + lanes < last, other=0).to(tl.float64)
        tl.store(param_squares + number, tl.sum(found))
    else:
        tiles = tl.load(param_tiles + param_count)
        worst = tl.full([LANES], 0x7FFFFFFF, tl.int32)
        for tile in range(0, tiles, LANES):
            is_bad = tl.load(non_finite + tile + lanes, mask=tile + lanes < tiles, other=0) != 0
            worst = tl.minimum(worst, tl.where(is_bad, (tile + lanes).to(tl.int32), worst))
        bad = tl.min(worst)
        before = tl.zeros([LANES], tl.int32)  # parameters that begin no later than the tile
        for param in range(0, param_count, LANES):
            live = param + lanes < param_count
            begins = tl.load(param_tiles + param + lanes, mask=live, other=0)
            before += (live & (begins <= bad)).to(tl.int32)
        tl.store(param_non_finite, tl.where(bad < tiles, tl.sum(before) - 1, -1))


@triton.jit(do_not_specialize=["count", "size", "blocks", "param_count"])
def gather(
    after,
    indices,
    values,
    count,
    size,
    blocks,
    param_tiles,
    squares,
    non_finite,
    param_squares,
    param_non_finite,
    param_count,
    BLOCK: tl.constexpr,
):
    """Extract the values at `indices`. The programs after those call `inspect`.

    Reads and writes a 32-byte sector of `after` for every index; neighbours share a sector.
    """
    block = tl.program_id(0)
    if block >= blocks:
        inspect(
            block - blocks,
            param_tiles,
            squares,
            non_finite,
            param_squares,
            param_non_finite,
            param_count,
        )
    else:
        lanes = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        at = tl.load(indices + lanes, mask=lanes < count, other=-1)
        inside = (at >= 0) & (at < size)
        selection = tl.load(after + at, mask=inside, other=0)
        tl.store(values + lanes, selection, mask=lanes < count)
        tl.debug_barrier()  # another thread may zero an entry than has read it
        tl.store(after + at, tl.zeros_like(selection), mask=inside)
