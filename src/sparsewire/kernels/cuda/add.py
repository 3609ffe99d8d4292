"""Messages added up by output tile, and errors put back."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["indices", "counts", "tile_count", "size", "rounds"])
def find_bounds(
    bounds,
    indices,
    counts,
    tiles,
    tile_count,
    size,
    rounds,
    MESSAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For every tile and message, the first entry that is not before the tile.

    Seven probes cut a range in eight: a third of the steps, each waiting for memory, of bisection.
    """
    message = tl.program_id(1)
    row = indices[0].to(tl.int64)
    count = counts[0]
    for number in tl.static_range(1, MESSAGES):
        row = tl.where(message == number, indices[number].to(tl.int64), row)
        count = tl.where(message == number, counts[number], count)
    entries = row.to(tl.pointer_type(tl.int64))
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(tiles + tile.to(tl.int64) * 4, mask=tile < tile_count, other=0)
    start = tl.where(tile < tile_count, start, size)
    low = tl.zeros([BLOCK], tl.int64)
    width = low + count
    probes = tl.arange(0, 8)[None, :]
    for _ in range(rounds):
        places = low[:, None] + (width[:, None] * (probes + 1) >> 3)
        asks = (probes < 7) & (width[:, None] > 0)
        is_before = asks & (tl.load(entries + places, mask=asks, other=0) < start[:, None])
        passed = tl.sum(is_before.to(tl.int64), 1)
        begin = tl.where(passed > 0, low + (width * passed >> 3) + 1, low)
        end = tl.where(passed < 7, low + (width * (passed + 1) >> 3), low + width)
        low = begin
        width = tl.maximum(end - begin, 0)
    tl.store(bounds + tile.to(tl.int64) * MESSAGES + message, low, mask=tile <= tile_count)


@triton.jit(do_not_specialize=["indices", "values", "counts"])
def add_messages(
    flat,
    indices,
    values,
    counts,
    share,
    bounds,
    tiles,
    MESSAGES: tl.constexpr,
    ADDS: tl.constexpr,  # to what is there, instead of to zero
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One output tile: every message in turn, so that the order of additions is the ranks'.

    Inside a message no coordinate comes twice. The entries of eight messages are fetched together;
    where one has too many of them here, all are added message by message.
    """
    tile = tl.program_id(0).to(tl.int64)
    start = tl.load(tiles + tile * 4)
    stop = tl.load(tiles + tile * 4 + 1)
    piece = tl.load(tiles + tile * 4 + 2)
    base = start // TILE * TILE
    if piece < 0:
        offset = tl.load(tiles + tile * 4 + 3) - start
        for chunk in range(0, TILE, CHUNK):
            places = base + chunk + tl.arange(0, CHUNK)
            inside = (places >= start) & (places < stop)
            total = tl.zeros([CHUNK], tl.float32)
            if ADDS:
                total = tl.load(flat + places, mask=inside, other=0)
            for number in tl.static_range(MESSAGES):
                at = counts[number] + offset + places
                total += tl.load(values[number] + at, mask=inside, other=0) * share
            tl.store(flat + places, total, mask=inside)
    else:
        if not ADDS:
            inner = tl.arange(0, TILE)
            nothing = tl.zeros([TILE], tl.float32)
            if stop - start == TILE:
                tl.store(flat + base + inner, nothing)
            else:
                low = (start - base).to(tl.int32)
                high = (stop - base).to(tl.int32)
                tl.store(flat + base + inner, nothing, mask=(inner >= low) & (inner < high))
            tl.debug_barrier()
        bounds += tile * MESSAGES
        rows = tl.arange(0, 8)
        lanes = tl.arange(0, LANES)
        for some in tl.static_range(0, MESSAGES, 8):
            live = some + rows < MESSAGES
            first = tl.load(bounds + some + rows, mask=live, other=0)
            last = tl.load(bounds + MESSAGES + some + rows, mask=live, other=0)
            if tl.max(last - first) <= LANES:
                index_row = tl.zeros([8], tl.int64)
                value_row = tl.zeros([8], tl.int64)
                for row in tl.static_range(8):
                    if some + row < MESSAGES:
                        index_row = tl.where(
                            rows == row, indices[some + row].to(tl.int64), index_row
                        )
                        value_row = tl.where(
                            rows == row, values[some + row].to(tl.int64), value_row
                        )
                entries = first[:, None] + lanes[None, :]
                is_there = entries < last[:, None]
                index_at = (index_row[:, None] + entries * 8).to(tl.pointer_type(tl.int64))
                value_at = (value_row[:, None] + entries * 4).to(tl.pointer_type(tl.float32))
                coordinates = tl.load(index_at, mask=is_there, other=-1)
                parts = tl.load(value_at, mask=is_there, other=0) * share
                lies_here = (coordinates >= start) & (coordinates < stop)
                for row in tl.static_range(8):
                    if some + row < MESSAGES:
                        goes = lies_here & (rows == row)[:, None]
                        held = tl.load(flat + coordinates, mask=goes, other=0)
                        tl.store(flat + coordinates, held + parts, mask=goes)
                        tl.debug_barrier()
            else:
                for row in tl.static_range(8):
                    if some + row < MESSAGES:
                        begin = tl.load(bounds + some + row)
                        end = tl.load(bounds + MESSAGES + some + row)
                        for entry in range(begin, end, LANES):
                            comes = entry + lanes < end
                            to = tl.load(indices[some + row] + entry + lanes, mask=comes, other=-1)
                            part = tl.load(values[some + row] + entry + lanes, mask=comes, other=0)
                            fits = (to >= start) & (to < stop)
                            old = tl.load(flat + to, mask=fits, other=0)
                            tl.store(flat + to, old + part * share, mask=fits)
                        tl.debug_barrier()


@triton.jit(do_not_specialize=["count", "size", "blocks"])
def put_entries(
    ledger,
    indices,
    errors,
    count,
    size,
    blocks,
    tiles,
    wholes,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add errors to the entries they came from; the programs behind those take whole tiles."""
    block = tl.program_id(0)
    if block < blocks:
        lanes = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        at = tl.load(indices + lanes, mask=lanes < count, other=-1)
        is_there = (at >= 0) & (at < size)
        wrong = tl.load(errors + lanes, mask=is_there, other=0)
        tl.store(ledger + at, tl.load(ledger + at, mask=is_there, other=0) + wrong, mask=is_there)
    else:
        tile = tl.load(wholes + (block - blocks))
        start = tl.load(tiles + tile * 4)
        stop = tl.load(tiles + tile * 4 + 1)
        offset = count + tl.load(tiles + tile * 4 + 3) - start
        for chunk in range(0, TILE, BLOCK):
            places = start // TILE * TILE + chunk + tl.arange(0, BLOCK)
            inside = (places >= start) & (places < stop)
            error = tl.load(errors + offset + places, mask=inside, other=0)
            held = tl.load(ledger + places, mask=inside, other=0)
            tl.store(ledger + places, held + error, mask=inside)
