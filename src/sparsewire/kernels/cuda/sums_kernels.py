"""The sum of messages, by output tile, and the return of rounding errors."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .cells import add_to_cells, clear_cells, open_cells, write_cells
from .columns import TILE_COLUMNS, TILE_PLACE, TILE_SEGMENT, TILE_START, TILE_STOP
from .device import one_of

# columns of the table of messages
INDICES = tl.constexpr(0)  # addresses
VALUES = tl.constexpr(1)
COUNT = tl.constexpr(2)  # the number of indices; later values belong to dense segments
COLUMNS = tl.constexpr(3)


@triton.jit(
    do_not_specialize=["indices", "values", "counts", "tile_count", "size", "rounds", "at", "many"]
)
def find_bounds(
    bounds,
    table,
    indices,
    values,
    counts,
    tiles,
    tile_count,
    size,
    rounds,
    at,
    many,
    MESSAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the first entry of some messages that is not before a tile, for every tile.

    Also write the table of the messages' addresses for `add_messages`.
    """
    number = tl.program_id(1)
    message = at + number
    index_row = one_of(indices, number, MESSAGES)
    count = counts[0]
    for other in tl.static_range(1, MESSAGES):
        count = tl.where(number == other, counts[other], count)
    if tl.program_id(0) == 0:
        tl.store(table + message * COLUMNS + INDICES, index_row)
        tl.store(table + message * COLUMNS + VALUES, one_of(values, number, MESSAGES))
        tl.store(table + message * COLUMNS + COUNT, count.to(tl.int64))
    entries = index_row.to(tl.pointer_type(tl.int64))
    tile = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(tiles + tile * TILE_COLUMNS + TILE_START, mask=tile < tile_count, other=0)
    start = tl.where(tile < tile_count, start, size)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + count
    for _ in range(rounds):
        middle = low + (high - low) // 2
        asks = low < high
        is_before = tl.load(entries + middle, mask=asks, other=0) < start
        low = tl.where(asks & is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    tl.store(bounds + tile * many + message, low, mask=tile <= tile_count)


@triton.jit(do_not_specialize=["many"])
def add_messages(
    flat,
    bounds,
    table,
    many,
    share,
    tiles,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Sum one output tile over the messages in turn, so that additions are in rank order.

    A message has no coordinate twice. The first entries of several messages are fetched together,
    and few tiles have more. Sums are made in shared memory, so every message is read once and the
    result is written once.
    """
    tile = tl.program_id(0).to(tl.int64)
    start = tl.load(tiles + tile * TILE_COLUMNS + TILE_START)
    stop = tl.load(tiles + tile * TILE_COLUMNS + TILE_STOP)
    base = start // TILE * TILE
    flat += base
    low = (start - base).to(tl.int32)
    high = (stop - base).to(tl.int32)
    if tl.load(tiles + tile * TILE_COLUMNS + TILE_SEGMENT) < 0:
        offset = tl.load(tiles + tile * TILE_COLUMNS + TILE_PLACE) - low
        for chunk in range(0, TILE, CHUNK):
            inner = chunk + tl.arange(0, CHUNK)
            inside = (inner >= low) & (inner < high)
            total = tl.zeros([CHUNK], tl.float32)
            for message in range(many):
                row = tl.load(table + message * COLUMNS + VALUES).to(tl.pointer_type(tl.float32))
                row += tl.load(table + message * COLUMNS + COUNT) + offset
                total += tl.load(row + inner, mask=inside, other=0) * share
            tl.store(flat + inner, total, mask=inside)
        return
    cells = open_cells(flat)
    clear_cells(cells, low, high, TILE, CHUNK)
    tl.debug_barrier()
    bounds += tile * many
    for some in range(0, many, BATCH):
        fetched = ()
        for number in tl.static_range(BATCH):
            entry, left, indices, values = part_of(bounds, table, some + number, many)
            fetched += (fetch(indices + entry, values + entry, left, LANES), left)
        for number in tl.static_range(BATCH):
            add_entries(cells, fetched[2 * number], share, start, stop, low)
            for more in range(LANES, fetched[2 * number + 1], LANES):
                entry, left, indices, values = part_of(bounds, table, some + number, many)
                at = entry + more
                found = fetch(indices + at, values + at, left - more, LANES)
                add_entries(cells, found, share, start, stop, low)
            tl.debug_barrier()
    write_cells(cells, flat, low, high, TILE, CHUNK)


@triton.jit
def part_of(bounds, table, message, many):
    """Return a message's first entry and number of entries in a tile, and its pointers."""
    is_there = message < many
    first = tl.load(bounds + message, mask=is_there, other=0)
    last = tl.load(bounds + many + message, mask=is_there, other=0)
    indices = tl.load(table + message * COLUMNS + INDICES, mask=is_there, other=0)
    values = tl.load(table + message * COLUMNS + VALUES, mask=is_there, other=0)
    return (
        first,
        last - first,
        indices.to(tl.pointer_type(tl.int64)),
        values.to(tl.pointer_type(tl.float32)),
    )


@triton.jit
def fetch(indices, values, left, LANES: tl.constexpr):
    """Return the first of the `left` entries at two pointers."""
    lanes = tl.arange(0, LANES)
    coordinates = tl.load(indices + lanes, mask=lanes < left, other=-1)
    return coordinates, tl.load(values + lanes, mask=lanes < left, other=0)


@triton.jit
def add_entries(cells, found, share, start, stop, low):
    """Add entries to the tile. Coordinates outside it are ignored."""
    at = found[0] - start
    lies_here = at.to(tl.uint64, bitcast=True) < (stop - start).to(tl.uint64, bitcast=True)
    add_to_cells(cells, low + at.to(tl.int32), found[1] * share, lies_here)


@triton.jit(do_not_specialize=["count", "size", "blocks"])
def put_entries(
    residual,
    indices,
    errors,
    count,
    size,
    blocks,
    tiles,
    dense,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add errors to the entries that caused them. The last programs handle dense tiles."""
    block = tl.program_id(0)
    if block < blocks:
        lanes = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        at = tl.load(indices + lanes, mask=lanes < count, other=-1)
        is_there = (at >= 0) & (at < size)
        wrong = tl.load(errors + lanes, mask=is_there, other=0)
        tl.store(
            residual + at, tl.load(residual + at, mask=is_there, other=0) + wrong, mask=is_there
        )
    else:
        tile = tl.load(dense + (block - blocks))
        start = tl.load(tiles + tile * TILE_COLUMNS + TILE_START)
        stop = tl.load(tiles + tile * TILE_COLUMNS + TILE_STOP)
        offset = count + tl.load(tiles + tile * TILE_COLUMNS + TILE_PLACE) - start
        for chunk in range(0, TILE, BLOCK):
            places = start // TILE * TILE + chunk + tl.arange(0, BLOCK)
            inside = (places >= start) & (places < stop)
            error = tl.load(errors + offset + places, mask=inside, other=0)
            held = tl.load(residual + places, mask=inside, other=0)
            tl.store(residual + places, held + error, mask=inside)
