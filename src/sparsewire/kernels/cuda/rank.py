"""The exact k-th magnitude of every segment, and the extraction of all entries that reach it.

The accumulation lists entries that reach a floor, a guess from the last step. Rounds over the list
find the k-th magnitude digit by digit from histograms, if it is at most 2^23 above the floor (as
integers; a factor of at least 1.75). If not, the guess was missed: a sample gives another floor,
and the segment is accumulated again. If that fails too, because too many magnitudes are equal, the
listed entries are put back and rounds over the whole segment follow. All kernels are always
launched, and return at once where they are not needed, so the host never waits.

If sample.py found a threshold, it is the floor, and the rank is needed only if more entries reach
the threshold than the capacity.
"""
# mypy: ignore-errors
# ruff: noqa: SIM102 (compile-time conditions are tested separately)

from __future__ import annotations

import triton
import triton.language as tl

from .accumulate import deposit_tile, inspect
from .columns import (
    ABOVE,
    COUNT_COLUMNS,
    COUNT_OVER,
    COUNT_TIES,
    CUT,
    FLOOR,
    GROUP_COLUMNS,
    GROUP_FIRST,
    GROUP_SEGMENT,
    GROUP_TILE,
    GROUP_TILES,
    LAST,
    LEFT,
    LISTED_COUNT,
    LOWEST,
    MARGIN,
    MISSES,
    OVER,
    PART_COLUMNS,
    PART_FIRST,
    PART_LENGTH,
    PATH,
    PREFIX,
    QUOTA,
    SEGMENT_CAPACITY,
    SEGMENT_COLUMNS,
    SEGMENT_COUNT,
    SEGMENT_GROUPS,
    SEGMENT_LENGTH,
    SEGMENT_SLOT,
    SEGMENT_START,
    SPILLED,
    STEPS,
    TICKET,
    TIES,
    TILE_COLUMNS,
    TILE_START,
    TILE_STOP,
)
from .device import below, count_before, magnitude, mix

# values of PATH: how a segment's rank is found
LISTED = tl.constexpr(0)  # from the list of the first accumulation
RETRIED = tl.constexpr(1)  # from the list of the second accumulation
SETTLED = tl.constexpr(2)  # not needed: all listed entries are extracted
COUNTED = tl.constexpr(3)  # as SETTLED, and the counts of all tiles are known
ALL = tl.constexpr(4)  # from the whole segment
ZERO = tl.constexpr(5)  # it is zero: all nonzero entries are listed and fewer than k

REACH = tl.constexpr(23)  # bits of the largest distance from the floor
UNLIMITED = tl.constexpr(1 << 40)
BINS = tl.constexpr(256)
PROBES = tl.constexpr(4096)  # the size of the sample for a floor


@triton.jit
def parts_of(parts, tiles, first, count, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Return the starts and lengths of a group's parts of the list, and the bases of its tiles."""
    rows = tl.arange(0, GROUP)
    live = rows < count
    begins = tl.load(parts + (first + rows) * PART_COLUMNS + PART_FIRST, mask=live, other=0)
    lengths = tl.load(parts + (first + rows) * PART_COLUMNS + PART_LENGTH, mask=live, other=0)
    starts = tl.load(tiles + (first + rows) * TILE_COLUMNS + TILE_START, mask=live, other=0)
    return begins, lengths, starts // TILE * TILE


@triton.jit
def listed_at(listed, list_capacity, begins, lengths, bases, at, LANES: tl.constexpr):
    """Return some entries of every part: values, coordinates, and which of them exist."""
    lanes = at + tl.arange(0, LANES)
    is_there = lanes[None, :] < lengths[:, None]
    entries = begins[:, None] + lanes[None, :]
    values = tl.load(listed + entries, mask=is_there, other=0).to(tl.float32, bitcast=True)
    inner = tl.load(listed + 2 * list_capacity + entries, mask=is_there, other=0)
    return values, bases[:, None] + inner, is_there


@triton.jit
def all_at(after, tiles, tile, at, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """Return some values of a tile, their coordinates, and which of them are inside."""
    start = tl.load(tiles + tile * TILE_COLUMNS + TILE_START)
    places = start // TILE * TILE + at + tl.arange(0, CHUNK)
    inside = (places >= start) & (places < tl.load(tiles + tile * TILE_COLUMNS + TILE_STOP))
    return tl.load(after + places, mask=inside, other=0), places, inside


@triton.jit
def is_last(here, programs):
    """Return whether all other programs of the segment have finished this round."""
    tl.debug_barrier()
    is_last = tl.atomic_add(here + TICKET, 1) == programs - 1
    if is_last:
        tl.store(here + TICKET, 0)
    return is_last


@triton.jit
def crossing(histogram, need, BINS: tl.constexpr):
    """Return the digit at which the count from the top reaches `need`, and its share of the count.

    The histogram is cleared.
    """
    bins = BINS - 1 - tl.arange(0, BINS)
    found = tl.load(histogram + bins, cache_modifier=".cg")
    tl.debug_barrier()  # another thread may clear a bin than has read it
    tl.store(histogram + bins, tl.zeros_like(found))
    is_short = tl.cumsum(found, 0) < need
    digit = BINS - 1 - tl.sum(is_short.to(tl.int32))
    passed = tl.sum(tl.where(is_short, found, 0))
    return digit.to(tl.int64), need - passed


@triton.jit
def add_digit(here, histogram, prefix, left, bits, BINS: tl.constexpr):
    """Find the next digit and append it to the prefix."""
    digit, left = crossing(histogram, left, BINS)
    prefix = (prefix << bits) + digit
    tl.store(here + PREFIX, prefix)
    tl.store(here + LEFT, left)
    return prefix, left


@triton.jit
def conclude(here, found, left, SAMPLED: tl.constexpr):
    """Store the cut and the quota, once all digits are known."""
    lowest = found * 0
    if SAMPLED:
        lowest = tl.load(here + LOWEST)
    tl.store(here + CUT, tl.maximum(found, lowest))
    tl.store(here + QUOTA, tl.where(lowest > found, UNLIMITED, left))


@triton.jit
def store_counts(tile_counts, group_counts, group_count, group, first, count, over, ties):
    """Store each tile's numbers of magnitudes over the cut and equal to it, and their sums."""
    rows = tl.arange(0, over.shape[0])
    tl.store(tile_counts + (first + rows) * COUNT_COLUMNS + COUNT_OVER, over, mask=rows < count)
    tl.store(tile_counts + (first + rows) * COUNT_COLUMNS + COUNT_TIES, ties, mask=rows < count)
    tl.store(group_counts + group, tl.sum(over))
    tl.store(group_counts + group_count + group, tl.sum(ties))


@triton.jit
def adjust_margin(here, wanted, listed_count, is_missed):
    """Adjust the margin so that the next step lists slightly more entries than wanted."""
    step = tl.where(listed_count > wanted * 11 // 8 + 24, 16, -32)
    step = tl.where(is_missed & (listed_count < wanted), -128, step)
    margin = tl.load(here + MARGIN) + step
    tl.store(here + MARGIN, tl.minimum(tl.maximum(margin, 3400), 4056))


@triton.jit
def sampled_floor(before, addend, segments, segment, wanted, HAS_BEFORE: tl.constexpr):
    """Return a magnitude that about 1.5 times the wanted number of entries reach.

    The sample has one coordinate of every stride, at a random offset. A fixed offset would see
    only a few taps and channels of a convolution.
    """
    start = tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_START)
    length = tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_LENGTH)
    stride = (length + PROBES - 1) // PROBES
    seen = (length + stride - 1) // stride
    lanes = tl.arange(0, PROBES).to(tl.int64)
    live = lanes < seen
    places = start + tl.minimum(lanes * stride + below(mix(lanes), stride), length - 1)
    total = tl.load(addend + places, mask=live, other=0).to(tl.float32)
    if HAS_BEFORE:
        total += tl.load(before + places, mask=live, other=0)
    sizes = magnitude(total)
    aim = (seen * wanted * 3 // 2 + length - 1) // length + 8
    floor = tl.zeros_like(wanted)
    for turn in range(16):  # the lower bits are not needed
        higher = floor + (1 << 30 >> turn)
        reached = tl.sum((live & (sizes >= higher)).to(tl.int32))
        floor = tl.where(reached >= aim, higher, floor)
    return tl.maximum(floor, 1)


# fmt: off
@triton.jit
def take_all_listed(
    parts, groups, tile_counts, group_counts, group_count, group, first, count, here,
    floor, listed_count, TRY: tl.constexpr, GROUP: tl.constexpr,
):
    """Extract all listed entries, since they fit into the capacity and no rank is needed."""
    # fmt: on
    if group == tl.load(groups + group * GROUP_COLUMNS + GROUP_FIRST):
        tl.store(here + PATH, COUNTED if TRY == LISTED else SETTLED)
        tl.store(here + CUT, floor.to(tl.int64) - 1)
        tl.store(here + QUOTA, UNLIMITED)
        tl.store(here + OVER, listed_count if TRY == LISTED else 0)
        tl.store(here + TIES, 0)
        tl.store(here + STEPS, tl.load(here + STEPS) + (1 if TRY == LISTED else 0))
    if TRY == LISTED:
        rows = tl.arange(0, GROUP)
        many = tl.load(
            parts + (first + rows) * PART_COLUMNS + PART_LENGTH, mask=rows < count, other=0
        )
        store_counts(
            tile_counts, group_counts, group_count, group, first, count, many, many * 0
        )


# fmt: off
@triton.jit
def count_listed(
    listed, list_capacity, begins, lengths, bases, longest, floor, prefix, found,
    SHIFT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
):
    """Add a histogram of a digit of the listed entries. Count those too far above the floor."""
    # fmt: on
    above = tl.zeros([GROUP * LANES], tl.int32)
    for at in range(0, longest, LANES):
        values, _, is_there = listed_at(
            listed, list_capacity, begins, lengths, bases, at, LANES
        )
        sizes = tl.reshape(magnitude(values) - floor, [GROUP * LANES])
        is_set = tl.reshape(is_there, [GROUP * LANES])
        digits = (sizes >> SHIFT) & ((1 << BITS) - 1)
        fits = is_set & (sizes >> (SHIFT + BITS) == prefix)
        if tl.max(fits.to(tl.int32)) > 0:
            found += tl.histogram(digits, BINS, mask=fits)
        above += (is_set & (sizes >> REACH != 0)).to(tl.int32)
    return found, above


# fmt: off
@triton.jit
def count_all(
    after, tiles, first, count, prefix, found,
    ALL_SHIFT: tl.constexpr, ALL_BITS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):
    """Add a histogram of a digit of all values of a group's tiles."""
    # fmt: on
    for chunk in range(count * (TILE // CHUNK)):
        tile = first + chunk // (TILE // CHUNK)
        within = chunk % (TILE // CHUNK) * CHUNK
        total, _, inside = all_at(after, tiles, tile, within, TILE, CHUNK)
        figures = (magnitude(total) >> ALL_SHIFT) & ((1 << ALL_BITS) - 1)
        matches = inside & (magnitude(total) >> (ALL_SHIFT + ALL_BITS) == prefix)
        found += tl.histogram(figures, BINS, mask=matches)
    return found


# fmt: off
@triton.jit
def evaluate_first(
    before, addend, segments, segment, here, histogram, path, wanted, floor, lowest,
    HAS_BEFORE: tl.constexpr, SAMPLED: tl.constexpr, TRY: tl.constexpr,
):
    """Evaluate the first digit from the list. If the list lacks the rank, choose another path."""
    # fmt: on
    over = tl.load(here + ABOVE, cache_modifier=".cg")
    digit, left = crossing(histogram, wanted - over, BINS)
    many = tl.load(here + LISTED_COUNT)
    is_short = many < wanted
    is_missed = (over >= wanted) | (tl.load(here + SPILLED) != 0)
    is_missed = is_missed | (is_short & (floor > lowest))
    tl.debug_barrier()  # all threads must read these before one changes them
    next_path = tl.where(is_short, ZERO, path)
    next_path = tl.where(is_missed, RETRIED if TRY == LISTED else ALL, next_path)
    tl.store(here + PATH, next_path)
    tl.store(here + PREFIX, tl.where(is_missed, 0, digit))
    tl.store(here + LEFT, tl.where(is_missed, wanted, left))
    tl.store(here + CUT, 0)  # this cut and quota are used on the path ZERO
    tl.store(here + QUOTA, left)
    tl.store(here + ABOVE, 0)
    tl.store(here + SPILLED, 0)
    if TRY == LISTED:
        if not SAMPLED:
            adjust_margin(here, wanted, many, is_missed)
        tl.store(here + OVER, 0)
        tl.store(here + TIES, 0)
        tl.store(here + STEPS, tl.load(here + STEPS) + 1)
        if is_missed:
            another = sampled_floor(before, addend, segments, segment, wanted, HAS_BEFORE)
            tl.store(here + FLOOR, tl.maximum(another, lowest))
            tl.store(here + LISTED_COUNT, 0)
            tl.store(here + MISSES, tl.load(here + MISSES) + 1)


# fmt: off
@triton.jit
def put_back_listed(
    after, listed, list_capacity, begins, lengths, bases, longest, LANES: tl.constexpr,
):
    """Write the listed entries back into `after`, before all of it is counted."""
    for at in range(0, longest, LANES):
        values, places, is_there = listed_at(
            listed, list_capacity, begins, lengths, bases, at, LANES
        )
        tl.store(after + places, values, mask=is_there)
    tl.debug_barrier()
# fmt: on


# fmt: off
@triton.jit
def evaluate(
    before, addend, segments, segment, here, histogram, path, by_list, wanted, floor, lowest,
    prefix, left, HAS_BEFORE: tl.constexpr, SAMPLED: tl.constexpr, TRY: tl.constexpr,
    FIRST: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr, ALL_SHIFT: tl.constexpr,
    ALL_BITS: tl.constexpr,
):
    """Append a digit to a segment's rank, from its histogram. Conclude after the last digit."""
    if FIRST and by_list:
        evaluate_first(
            before, addend, segments, segment, here, histogram, path, wanted, floor, lowest,
            HAS_BEFORE, SAMPLED, TRY,
        )
    else:
        digits = tl.where(by_list, BITS, ALL_BITS)
        cut, quota = add_digit(here, histogram, prefix, left, digits, BINS)
        if by_list:
            if SHIFT == 0:
                conclude(here, cut + floor, quota, SAMPLED)
        else:
            if ALL_SHIFT == 0:
                conclude(here, cut, quota, SAMPLED)
# fmt: on


# fmt: off
@triton.jit(do_not_specialize=["list_capacity", "group_count", "param_count"])
def rank(
    before, addend, after, listed, list_capacity, parts, tiles, groups, segments, state, histograms,
    tile_counts, group_counts, group_count, param_tiles, squares, non_finite, param_squares,
    param_non_finite, param_count,
    HAS_BEFORE: tl.constexpr, SAMPLED: tl.constexpr, TRY: tl.constexpr,
    FIRST: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr,  # of the digit from the list
    ALL_FIRST: tl.constexpr, ALL_SHIFT: tl.constexpr, ALL_BITS: tl.constexpr,  # of that from all
    TILE: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
    STATE: tl.constexpr,
):
    """Find one digit of the rank. The last group of a segment to finish evaluates it.

    TRY is LISTED or RETRIED. 0 bits mean no digit. In the very first round, the first programs call
    `inspect`. A round over the list reads 4 bytes for every entry. A round over the whole segment,
    which is rare, reads `after`.
    """
    group = tl.program_id(0)
    if FIRST and TRY == LISTED:
        if group <= param_count:
            inspect(
                group, param_tiles, squares, non_finite, param_squares, param_non_finite,
                param_count,
            )
            return
        group -= param_count + 1
    first = tl.load(groups + group * GROUP_COLUMNS + GROUP_TILE)
    count = tl.load(groups + group * GROUP_COLUMNS + GROUP_TILES)
    segment = tl.load(groups + group * GROUP_COLUMNS + GROUP_SEGMENT)
    here = state + segment * STATE
    path = tl.load(here + PATH)
    if FIRST and TRY == LISTED:
        path = path * 0
    by_list = (path == TRY) & (BITS > 0)
    by_all = (path == ALL) & (ALL_BITS > 0)
    if not (by_list | by_all | (ALL_FIRST & (path == ZERO))):
        return
    floor = tl.load(here + FLOOR).to(tl.int32)
    lowest = floor * 0 + 1
    wanted = tl.load(
        segments + segment * SEGMENT_COLUMNS + (SEGMENT_CAPACITY if SAMPLED else SEGMENT_COUNT)
    )
    if SAMPLED:
        lowest = tl.load(here + LOWEST).to(tl.int32)
    if SAMPLED and FIRST:
        listed_count = tl.load(here + LISTED_COUNT)
        if (listed_count <= wanted) & (floor == lowest) & (tl.load(here + SPILLED) == 0):
            take_all_listed(
                parts, groups, tile_counts, group_counts, group_count, group, first, count, here,
                floor, listed_count, TRY, GROUP,
            )
            return
    prefix, left = tl.zeros_like(segment), wanted
    if not FIRST:
        prefix, left = tl.load(here + PREFIX), tl.load(here + LEFT)
    begins, lengths, bases = parts_of(parts, tiles, first, count, TILE, GROUP)
    longest, found = tl.max(lengths), tl.zeros([BINS], tl.int32)
    if BITS > 0:
        if by_list:
            found, above = count_listed(
                listed, list_capacity, begins, lengths, bases, longest, floor, prefix, found,
                SHIFT, BITS, GROUP, LANES,
            )
            if FIRST:
                tl.atomic_add(here + ABOVE, tl.sum(above).to(tl.int64), sem="relaxed")
    if ALL_FIRST:
        if path >= ALL:
            put_back_listed(after, listed, list_capacity, begins, lengths, bases, longest, LANES)
        if path == ZERO:
            return
    if ALL_BITS > 0:
        if by_all:
            found = count_all(
                after, tiles, first, count, prefix, found, ALL_SHIFT, ALL_BITS, TILE, CHUNK,
            )
    histogram = histograms + segment * BINS
    tl.atomic_add(histogram + tl.arange(0, BINS), found, mask=found > 0, sem="relaxed")
    if is_last(here, tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_GROUPS)):
        evaluate(
            before, addend, segments, segment, here, histogram, path, by_list, wanted, floor,
            lowest, prefix, left, HAS_BEFORE, SAMPLED, TRY, FIRST, SHIFT, BITS, ALL_SHIFT, ALL_BITS,
        )
# fmt: on


# fmt: off
@triton.jit(do_not_specialize=["list_capacity"])
def deposit_again(
    before, addend, after, tiles, groups, state, listed, parts, cursor, squares, non_finite,
    list_capacity, HAS_BEFORE: tl.constexpr, TILE: tl.constexpr, STATE: tl.constexpr,
):
    """Accumulate segments whose guess was missed again, with the same traffic as the first time."""
    group = tl.program_id(0)
    segment = tl.load(groups + group * GROUP_COLUMNS + GROUP_SEGMENT)
    if tl.load(state + segment * STATE + PATH) == RETRIED:
        first = tl.load(groups + group * GROUP_COLUMNS + GROUP_TILE)
        for tile in range(first, first + tl.load(groups + group * GROUP_COLUMNS + GROUP_TILES)):
            start = tl.load(tiles + tile * TILE_COLUMNS + TILE_START)
            stop = tl.load(tiles + tile * TILE_COLUMNS + TILE_STOP)
            deposit_tile(
                before, addend, after, after, tiles, state, listed, parts, cursor, squares,
                non_finite, list_capacity, 2 * list_capacity, tile, start, stop, segment, segment,
                False, HAS_BEFORE, True, True, TILE, STATE,
            )
# fmt: on


@triton.jit(do_not_specialize=["list_capacity", "group_count"])
def count_over(
    after,
    listed,
    list_capacity,
    parts,
    tiles,
    groups,
    state,
    tile_counts,
    group_counts,
    group_count,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    STATE: tl.constexpr,
):
    """Count the magnitudes of every tile, group and segment over the cut, and equal to it."""
    group = tl.program_id(0)
    first = tl.load(groups + group * GROUP_COLUMNS + GROUP_TILE)
    count = tl.load(groups + group * GROUP_COLUMNS + GROUP_TILES)
    here = state + tl.load(groups + group * GROUP_COLUMNS + GROUP_SEGMENT) * STATE
    path = tl.load(here + PATH)
    if path == COUNTED:
        return
    cut = tl.load(here + CUT)
    over = tl.zeros([GROUP], tl.int32)
    ties = tl.zeros([GROUP], tl.int32)
    rows = tl.arange(0, GROUP)
    if path < ALL:
        begins, lengths, bases = parts_of(parts, tiles, first, count, TILE, GROUP)
        for at in range(0, tl.max(lengths), LANES):
            values, _, is_there = listed_at(
                listed, list_capacity, begins, lengths, bases, at, LANES
            )
            sizes = magnitude(values)
            over += tl.sum((is_there & (sizes > cut)).to(tl.int32), 1)
            ties += tl.sum((is_there & (sizes == cut)).to(tl.int32), 1)
    else:
        for chunk in range(count * (TILE // CHUNK)):
            row = chunk // (TILE // CHUNK)
            within = chunk % (TILE // CHUNK) * CHUNK
            held, _, inside = all_at(after, tiles, first + row, within, TILE, CHUNK)
            found = magnitude(held)
            over += tl.where(rows == row, tl.sum((inside & (found > cut)).to(tl.int32)), 0)
            ties += tl.where(rows == row, tl.sum((inside & (found == cut)).to(tl.int32)), 0)
    store_counts(tile_counts, group_counts, group_count, group, first, count, over, ties)
    tl.atomic_add(here + OVER, tl.sum(over).to(tl.int64), sem="relaxed")
    tl.atomic_add(here + TIES, tl.sum(ties).to(tl.int64), sem="relaxed")


@triton.jit
def finite(magnitude):
    """Return a magnitude as a float, clipped to be finite."""
    return tl.minimum(magnitude.to(tl.int32), 0x7E800000).to(tl.float32, bitcast=True)


@triton.jit
def slots(state, segment, segment_count, STATE: tl.constexpr):
    """Return the number of entries of all earlier segments, and of all segments."""
    BLOCK: tl.constexpr = 256
    before = tl.zeros([BLOCK], tl.int64)
    total = tl.zeros([BLOCK], tl.int64)
    for at in range(0, segment_count, BLOCK):
        segments = at + tl.arange(0, BLOCK)
        live = segments < segment_count
        there = state + segments.to(tl.int64) * STATE
        ties = tl.load(there + TIES, mask=live, other=0)
        quota = tl.load(there + QUOTA, mask=live, other=0)
        entries = tl.load(there + OVER, mask=live, other=0) + tl.minimum(ties, quota)
        total += entries
        before += tl.where(segments < segment, entries, 0)
    return tl.sum(before), tl.sum(total)


@triton.jit
def fill_capacity(indices, values, total, capacity, size, group, group_count):
    """Fill one group's share of the unused slots with padding."""
    BLOCK: tl.constexpr = 1024
    share = (capacity + group_count - 1) // group_count
    last = tl.minimum(capacity, (group + 1) * share)
    for at in range(tl.maximum(total, group * share), last, BLOCK):
        lanes = at + tl.arange(0, BLOCK)
        tl.store(indices + lanes, tl.zeros([BLOCK], tl.int64) + size, mask=lanes < last)
        tl.store(values + lanes, tl.zeros([BLOCK], tl.float32), mask=lanes < last)


@triton.jit
def aim_floor(here, cut):
    """Set the next step's floor, from the cuts of this step and the last one."""
    found = finite(cut)
    last = finite(tl.load(here + LAST))
    rise = tl.where(last > 0, tl.minimum(tl.maximum(found - last, 0), 0.5 * found), 0)
    share = tl.load(here + MARGIN).to(tl.float32) / 4096
    floor = (found + 0.5 * rise) * share  # expect half of the last rise
    tl.store(here + FLOOR, tl.maximum(floor.to(tl.int32, bitcast=True), 1).to(tl.int64))
    tl.store(here + LAST, cut)


# fmt: off
@triton.jit
def extract_listed(
    after, listed, list_capacity, begins, lengths, bases, over_seen, ties_seen, cut, quota,
    indices, values, slot, capacity, LANES: tl.constexpr,
):
    """Extract from the listed entries, and put the rest back."""
    # fmt: on
    for at in range(0, tl.max(lengths), LANES):
        selection, places, is_there = listed_at(
            listed, list_capacity, begins, lengths, bases, at, LANES
        )
        sizes = magnitude(selection)
        is_over = (is_there & (sizes > cut)).to(tl.int32)
        is_tie = (is_there & (sizes == cut)).to(tl.int32)
        tie = ties_seen[:, None] + tl.cumsum(is_tie, 1) - is_tie
        slots_over = over_seen[:, None] + tl.cumsum(is_over, 1) - is_over
        goes = (is_over != 0) | ((is_tie != 0) & (tie < quota))
        to = slot + slots_over + tl.minimum(tie, quota)
        tl.store(indices + to, places, mask=goes & (to < capacity))
        tl.store(values + to, selection, mask=goes & (to < capacity))
        tl.store(after + places, selection, mask=is_there & ~goes)
        over_seen += tl.sum(is_over, 1)
        ties_seen += tl.sum(is_tie, 1)


# fmt: off
@triton.jit
def extract_all(
    after, tiles, first, count, over_before, ties_before, cut, quota,
    indices, values, slot, capacity, TILE: tl.constexpr, CHUNK: tl.constexpr,
):
    """Extract from all values of a group's tiles."""
    # fmt: on
    for chunk in range(count * (TILE // CHUNK)):
        tile = first + chunk // (TILE // CHUNK)
        within = chunk % (TILE // CHUNK) * CHUNK
        held, coordinates, inside = all_at(after, tiles, tile, within, TILE, CHUNK)
        reached = magnitude(held)
        over_here = (inside & (reached > cut)).to(tl.int32)
        ties_here = (inside & (reached == cut)).to(tl.int32)
        tie_here = ties_before + tl.cumsum(ties_here, 0) - ties_here
        leaves = (over_here != 0) | ((ties_here != 0) & (tie_here < quota))
        place = over_before + tl.cumsum(over_here, 0) - over_here
        place += slot + tl.minimum(tie_here, quota)
        tl.store(indices + place, coordinates, mask=leaves & (place < capacity))
        tl.store(values + place, held, mask=leaves & (place < capacity))
        tl.store(after + coordinates, tl.zeros_like(held), mask=leaves)
        over_before += tl.sum(over_here)
        ties_before += tl.sum(ties_here)


@triton.jit(do_not_specialize=["list_capacity", "size", "capacity", "group_count", "segment_count"])
def extract(
    after,
    listed,
    list_capacity,
    parts,
    cursor,
    tiles,
    groups,
    segments,
    state,
    tile_counts,
    group_counts,
    indices,
    values,
    all_count,
    size,
    capacity,
    group_count,
    segment_count,
    SAMPLED: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    STATE: tl.constexpr,
):
    """Extract the entries over the cut in order, and the leftmost `quota` entries equal to it.

    Reads 8 bytes for every listed entry. Scatters the entries that stay back into `after`, and
    writes 12 bytes for each of the others. On the path ALL, it also reads `after`.
    """
    group = tl.program_id(0)
    first = tl.load(groups + group * GROUP_COLUMNS + GROUP_TILE)
    count = tl.load(groups + group * GROUP_COLUMNS + GROUP_TILES)
    segment = tl.load(groups + group * GROUP_COLUMNS + GROUP_SEGMENT)
    first_group = tl.load(groups + group * GROUP_COLUMNS + GROUP_FIRST)
    here = state + segment * STATE
    path = tl.load(here + PATH)
    cut = tl.load(here + CUT)
    quota = tl.load(here + QUOTA)
    slot = tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_SLOT)
    if SAMPLED:
        slot, total = slots(state, segment, segment_count, STATE)
        fill_capacity(indices, values, total, capacity, size, group, group_count)
        if group == 0:
            tl.store(all_count, total)
    if group == 0:
        tl.store(cursor, 0)
        tl.store(cursor + 1, list_capacity)
    if group == first_group:
        tl.store(here + LISTED_COUNT, 0)
        if not SAMPLED:
            aim_floor(here, cut)

    over_before = count_before(group_counts, first_group, group, 1024)
    ties_before = count_before(group_counts + group_count, first_group, group, 1024)
    if path < ALL:
        rows = tl.arange(0, GROUP)
        over = tl.load(
            tile_counts + (first + rows) * COUNT_COLUMNS + COUNT_OVER, mask=rows < count, other=0
        )
        ties = tl.load(
            tile_counts + (first + rows) * COUNT_COLUMNS + COUNT_TIES, mask=rows < count, other=0
        )
        over_seen = over_before + tl.cumsum(over, 0) - over
        ties_seen = ties_before + tl.cumsum(ties, 0) - ties
        begins, lengths, bases = parts_of(parts, tiles, first, count, TILE, GROUP)
        extract_listed(
            after, listed, list_capacity, begins, lengths, bases, over_seen, ties_seen, cut, quota,
            indices, values, slot, capacity, LANES,
        )
    else:
        extract_all(
            after, tiles, first, count, over_before, ties_before, cut, quota,
            indices, values, slot, capacity, TILE, CHUNK,
        )
    # fmt: on
