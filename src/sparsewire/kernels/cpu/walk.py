"""Selection loops: accumulate a tile, withdraw its candidates, put surplus candidates back.

Candidates are float32 values, kept as bits (`raw`), with their positions (`places`), ascending.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .floors import SAMPLE, Guesses, SegmentColumns, learn, likely_floor, threshold
from .jit import Array, jit
from .numbers import (
    INFINITE,
    NEVER,
    NONE,
    PLAIN,
    Sources,
    kth_magnitude,
    magnitude,
    reaching,
    smallest,
    widen,
)
from .stripes import (
    STRIPE,
    address,
    bits_set,
    deposit_stripe,
    deposit_stripe_past_cache,
    finish_writing,
    float32_at,
    lowest_bit,
)

TILE = 8192  # coordinates of a tile
SHORT = 8 * STRIPE  # a shorter tile does not justify splitting off a head and a rest
LEAP = 4 * STRIPE  # bytes of a stripe
PAGE = 1024  # numbers


class Tiles(NamedTuple):
    """The tiles of one thread, and per-tile results."""

    starts: Array
    stops: Array
    params: Array
    segments: Array  # -1 where the segment is sent densely
    dense: Array  # offset of a dense tile in the dense values; -1 for sparse tiles
    squares: Array  # output: the sum of squares of the addend


class Candidates(NamedTuple):
    """Entries withdrawn because their magnitude reaches a floor, grouped by segment."""

    raw: Array  # the values' bits
    places: Array
    found: Array  # the number in each segment


class Picks(NamedTuple):
    """Entries withdrawn at given positions."""

    places: Array
    values: Array  # output


class Scratch(NamedTuple):
    """Per-thread memory, small enough for the caches."""

    space: Array  # see `_divide`
    marks: Array  # bit mask of picked coordinates in a tile; all zero between tiles
    sample: Array

    @staticmethod
    def make() -> Scratch:
        """Allocate memory outside compiled loops, which free arrays still in use by address.

        Starts at a page boundary, because constantly written memory must not straddle two pages.
        """
        length = 2 * TILE + 6 * STRIPE
        space = np.zeros(length + PAGE, np.float32)
        begin = -space.ctypes.data % (4 * PAGE) // 4
        space = space[begin : begin + length]
        _divide(space)[1][:] = -0.0
        return Scratch(space, np.zeros(TILE // STRIPE + 2, np.uint64), np.empty(0, np.uint32))


class Span(NamedTuple):
    """The addresses of a tile: goal = left + right. A step of 0 reuses the same `left` stripe."""

    left: Any
    step: Any
    right: Any
    goal: Any
    start: Any  # first coordinate
    length: Any


@jit
def _divide(space: Array) -> tuple[Array, Array, Array, Array]:
    """Divide scratch space into five stripes of buffers, a stripe of -0, and two tiles.

    -0 is the exact additive identity: adding it preserves even -0.
    """
    blank, first, second = 5 * STRIPE, 6 * STRIPE, 6 * STRIPE + TILE
    return space[:blank], space[blank:first], space[first:second], space[second:]


@jit
def _exact_squares(addend: Array) -> float:
    squares = 0.0
    for n in range(len(addend)):
        squares += np.float64(addend[n]) * np.float64(addend[n])
    return squares


@jit
def keep_largest(raw: Array, places: Array, begin: Any, end: Any, count: int, bits: Array) -> Any:
    """Keep the `count` largest candidates in [begin, end), and put the others back.

    Ties keep the lower position. Returns the smallest magnitude kept.
    """
    floor = kth_magnitude(raw[begin:end], count)
    above = reaching(raw[begin:end], np.uint32(floor + np.uint32(1)))
    ties = count - above
    at = begin
    for n in range(begin, end):
        size = magnitude(raw[n])
        is_tie = size == floor
        if size > floor or (is_tie and ties > 0):
            ties -= is_tie
            raw[at] = raw[n]
            places[at] = places[n]
            at += 1
        else:
            bits[places[n]] = raw[n]
    return floor


@jit
def _deposit_rest(
    left: Any, right: Any, goal: Any, count: Any, floor: Any, given: Any, rest: Array
) -> Any:
    """Accumulate a partial stripe of `count` numbers."""
    lefts, rights, goals = (
        float32_at(left, count),
        float32_at(right, count),
        float32_at(goal, count),
    )
    for n in range(count):
        rest[STRIPE + n] = lefts[n]
        rest[2 * STRIPE + n] = rights[n]
    for n in range(count, STRIPE):
        rest[STRIPE + n] = np.float32(0)
        rest[2 * STRIPE + n] = np.float32(0)
    sums = address(rest)
    word, bad, squares = deposit_stripe(
        sums + LEAP, sums + 2 * LEAP, sums, sums + 3 * LEAP, floor, given
    )
    for n in range(count):
        goals[n] = rest[3 * STRIPE + n]
    return word & ((np.uint64(1) << np.uint64(count)) - np.uint64(1)), bad, squares


@jit
def _take(word: Any, base: Any, sums: Array, raw: Array, places: Array, at: Any) -> Any:
    """Write the sums and positions of a stripe's set bits. Return the end of the output.

    Most words have at most two set bits, so two entries are always written; the next word
    overwrites the surplus.
    """
    one = np.uint64(1)
    first = lowest_bit(word)
    raw[at], places[at] = sums[first], base + first
    word_left = word & (word - one)
    second = lowest_bit(word_left)
    raw[at + 1], places[at + 1] = sums[second], base + second
    word_left &= word_left - one
    later = at + 2
    while word_left != np.uint64(0):
        place = lowest_bit(word_left)
        raw[later], places[later] = sums[place], base + place
        later += 1
        word_left &= word_left - one
    return at + bits_set(word)


@jit
def _head(goal: int, length: int, past_cache: bool) -> Any:
    """Return the number of leading values before the tile's first aligned cache line."""
    return min(length, ((-goal) & 63) >> 2) if past_cache else np.int64(0)


@jit
def _deposit(
    span: Span,
    floor: Any,
    past_cache: bool,
    marks: Array,
    rest: Array,
    raw: Array,
    places: Array,
    at: Any,
) -> Any:
    """Accumulate a tile, and withdraw entries that reach the floor or are marked.

    The upper bits of the first word of `marks` cover the head; the other words follow. Withdrawn
    entries are written to `raw` and `places`. Returns their end, the sum of squares, and whether
    any sum is non-finite. Reads left and right once and writes goal once, with non-temporal stores
    if `past_cache`.
    """
    left, step, right, goal, start, length = span
    sums, sum_bits = address(rest), rest.view(np.uint32)
    head = _head(goal, length, past_cache)
    bad, squares = np.uint64(0), np.float32(0)
    base = np.int64(start)
    if head:
        given = marks[0] >> np.uint64(STRIPE - head)
        word, bad, squares = _deposit_rest(left, right, goal, head, floor, given, rest)
        at = _take(word, base, sum_bits, raw, places, at)
        left += min(step, 4 * head)
        base, right, goal = base + head, right + 4 * head, goal + 4 * head
    stripes = (length - head) // STRIPE
    marks = marks[1:]
    if past_cache:
        for n in range(stripes):
            word, more, part = deposit_stripe_past_cache(left, right, sums, goal, floor, marks[n])
            at = _take(word, base, sum_bits, raw, places, at)
            bad, squares = bad | more, squares + part
            left, right, goal = left + step, right + LEAP, goal + LEAP
            base += STRIPE
    else:
        for n in range(stripes):
            word, more, part = deposit_stripe(left, right, sums, goal, floor, marks[n])
            at = _take(word, base, sum_bits, raw, places, at)
            bad, squares = bad | more, squares + part
            left, right, goal = left + step, right + LEAP, goal + LEAP
            base += STRIPE
    count = length - head - stripes * STRIPE
    if count:
        word, more, part = _deposit_rest(left, right, goal, count, floor, marks[stripes], rest)
        at = _take(word, base, sum_bits, raw, places, at)
        bad, squares = bad | more, squares + part
    return at, squares, bad != np.uint64(0)


@jit
def _close(
    candidates: Candidates, begin: Any, at: Any, limit: Any, segment: Any, bits: Array
) -> Any:
    """Keep at most `limit` candidates of a finished segment. Return the end of the candidates."""
    if at - begin > limit:
        keep_largest(candidates.raw, candidates.places, begin, at, limit, bits)
        at = begin + limit
    candidates.found[segment] = at - begin
    return at


@jit
def _mark(chosen: Array, cursor: Any, stop: Any, shift: Any, marks: Array) -> Any:
    """Mark the chosen positions before `stop`. Return the cursor of the next one."""
    while cursor < len(chosen) and chosen[cursor] < stop:
        place = chosen[cursor] + shift
        marks[place >> 6] |= np.uint64(1) << np.uint64(place & 63)
        cursor += 1
    return cursor


@jit
def walk(
    tiles: Tiles,
    sources: Sources,
    after: Array,
    dense: Array,
    segments: SegmentColumns,
    floors: Array,
    candidates: Candidates,
    picks: Picks,
    past_cache: bool,
    scratch: Scratch,
) -> Any:
    """Accumulate tiles and withdraw candidates. Return the first non-finite parameter, or -1.

    Dense tiles move to `dense`. Entries that reach `floors` go to `candidates`, up to the limit of
    each segment. With strides, floors are thresholds estimated from a sample just before each
    segment is processed, which also loads the segment into the cache. Without floors, the entries
    at `picks` are withdrawn instead.

    Memory: reads `before` and `addend` once and writes `after` once, with non-temporal stores if
    `past_cache`. A dense tile is written twice, as values and as zeros. All other data stays in the
    cache.
    """
    bits = after.view(np.uint32)
    value_bits = picks.values.view(np.uint32)
    # Unpacked once, because numba counts references on every struct access in the loop.
    starts, stops, params, owners, dense_places, squares = tiles
    before, addend, halves, kind = sources
    limits, has_strides = segments.limits, len(segments.strides) > 0
    raw, places, chosen, marks = candidates.raw, candidates.places, picks.places, scratch.marks
    rest, blank, wide, _ = _divide(scratch.space)
    left, step = address(blank), np.int64(0)
    segment, begin, at = -1, np.int64(0), np.int64(0)
    floor, cursor, non_finite = NEVER, 0, -1
    for tile in range(len(starts)):
        start, stop, owner = starts[tile], stops[tile], owners[tile]
        length = stop - start
        selects = owner >= 0 and len(floors) > 0
        if not selects:
            floor = NEVER
        elif owner != segment:
            if segment >= 0:
                at = _close(candidates, begin, at, limits[segment], segment, bits)
            segment = owner
            if has_strides:
                last = floors[segment]
                floors[segment] = threshold(sources, segments, segment, last, scratch.sample)
            begin, floor = at, floors[segment]
        elif at - begin + length > 2 * limits[segment] + 2 * TILE:
            least = keep_largest(raw, places, begin, at, limits[segment], bits)
            at = begin + limits[segment]
            floor = np.uint32(least + np.uint32(1))  # later ties lose to lower positions
        if len(before):
            left, step = address(before) + 4 * start, np.int64(LEAP)
        if kind == PLAIN:
            right = address(addend) + 4 * start
        else:
            widen(halves[start:stop], kind, wide.view(np.uint32))
            right = address(wide)
        goal = address(after) + 4 * start
        if dense_places[tile] >= 0:
            goal = address(dense) + 4 * dense_places[tile]
            after[start:stop] = np.float32(0)
        span = Span(left, step, right, goal, start, length)
        first, former = cursor, at
        is_past = past_cache and length >= SHORT
        shift = STRIPE - _head(goal, length, is_past) - start
        cursor = _mark(chosen, cursor, stop, shift, marks)
        at, total, is_bad = _deposit(span, floor, is_past, marks, rest, raw, places, at)
        squares[tile] = total if np.isfinite(total) else _exact_squares(float32_at(right, length))
        if is_bad and non_finite < 0:
            non_finite = params[tile]
        if not selects:
            at = former
            for n in range(first, cursor):
                value_bits[n] = raw[at + n - first]
                marks[(chosen[n] + shift) >> 6] = np.uint64(0)
    finish_writing()
    if segment >= 0:
        _close(candidates, begin, at, limits[segment], segment, bits)
    return non_finite


@jit
def start_walk(
    tiles: Any,
    sources: Any,
    after: Array,
    dense: Array,
    segments: Any,
    floors: Array,
    candidates: Any,
    picks: Any,
    past_cache: bool,
    scratch: Any,
) -> Any:
    """Call `walk` with arguments passed as plain tuples.

    Passing a named tuple from Python to numba costs about a microsecond more, several percent of
    the time for a million values.
    """
    return walk(
        Tiles(*tiles),
        Sources(*sources),
        after,
        dense,
        SegmentColumns(*segments),
        floors,
        Candidates(*candidates),
        Picks(*picks),
        past_cache,
        Scratch(*scratch),
    )


@jit
def _search(
    after: Array,
    first: int,
    length: int,
    floor: Any,
    limit: int,
    candidates: Candidates,
    at: Any,
    scratch: Scratch,
) -> Any:
    """Withdraw candidates from an already accumulated segment. Return the end of the candidates.

    Reads the segment once and writes only at candidate positions.
    """
    bits, raw, places = after.view(np.uint32), candidates.raw, candidates.places
    rest, blank, _, goals = _divide(scratch.space)
    left, step, no = address(blank), np.int64(0), length < 0
    begin = at
    for start in range(first, first + length, TILE):
        stop = min(start + TILE, first + length)
        if at - begin + stop - start > 2 * limit + 2 * TILE:
            least = keep_largest(raw, places, begin, at, limit, bits)
            floor = np.uint32(least + np.uint32(1))
            at = begin + limit
        here, last = address(after) + 4 * start, at
        span = Span(left, step, here, address(goals), start, stop - start)
        at, _, _ = _deposit(span, floor, no, scratch.marks, rest, raw, places, at)
        for n in range(last, at):
            bits[places[n]] = np.uint32(0)
    if at - begin > limit:
        keep_largest(raw, places, begin, at, limit, bits)
        at = begin + limit
    return at


@jit
def _put_back(candidates: Candidates, low: Any, high: Any, bits: Array) -> None:
    for n in range(low, high):
        bits[candidates.places[n]] = candidates.raw[n]


@jit
def _search_again(
    after: Array,
    segment: int,
    segments: SegmentColumns,
    candidates: Candidates,
    spare: Any,
    scratch: Scratch,
) -> Any:
    """Search a segment again, appending to the other candidates. Return the end of the candidates.

    Estimates a floor from a sample. If that floor is also too high, every entry is a candidate.
    """
    bits = after.view(np.uint32)
    first, length = segments.starts[segment], segments.lengths[segment]
    limit = segments.limits[segment]
    sample = bits[first : first + length : max(1, length // SAMPLE)].copy()
    floor = likely_floor(sample, limit, length)
    end = _search(after, first, length, floor, limit, candidates, spare, scratch)
    if end - spare < limit:
        _put_back(candidates, spare, end, bits)
        end = _search(after, first, length, NONE, limit, candidates, spare, scratch)
    return end


@jit
def settle(
    segments: SegmentColumns,
    is_exact: bool,
    after: Array,
    candidates: Candidates,
    guesses: Guesses,
    indices: Array,
    values: Array,
    scratch: Scratch,
) -> Any:
    """Write the candidates of every segment in ascending order. Return their number.

    If threads found more candidates than the limit, only the largest are kept. If `is_exact` and
    fewer were found, the floor was too high, and the segment is searched again.

    Memory: touches only the candidates and the segments that are searched again.
    """
    bits = after.view(np.uint32)
    value_bits = values.view(np.uint32)
    kth_values = guesses.kth.view(np.float32)
    raw, places, found = candidates.raw, candidates.places, candidates.found
    spare = np.int64(0)
    for segment in range(len(found)):
        spare += found[segment]
    begin, out = np.int64(0), np.int64(0)
    for segment in range(len(found)):
        limit = segments.limits[segment]
        low, high = begin, begin + found[segment]
        begin = high
        is_missed = is_exact and found[segment] < limit
        if found[segment] > limit:
            keep_largest(raw, places, low, high, limit, bits)
            high = low + limit
        elif is_missed:
            _put_back(candidates, low, high, bits)
            low, high = spare, _search_again(after, segment, segments, candidates, spare, scratch)
        if is_exact:
            last, was_known = kth_values[segment], guesses.kth[segment] < INFINITE
            guesses.kth[segment] = smallest(raw[low:high])
            if was_known:
                guesses.tally[np.int64(is_missed)] += 1
                learn(kth_values[segment], last, guesses, segment)
        for n in range(high - low):
            indices[out + n] = places[low + n]
            value_bits[out + n] = raw[low + n]
        out += high - low
    return out


@jit
def start_settle(
    segments: Any,
    is_exact: bool,
    after: Array,
    candidates: Any,
    guesses: Any,
    indices: Array,
    values: Array,
    scratch: Any,
) -> Any:
    """Call `settle` with plain tuples, as `start_walk` does."""
    return settle(
        SegmentColumns(*segments),
        is_exact,
        after,
        Candidates(*candidates),
        Guesses(*guesses),
        indices,
        values,
        Scratch(*scratch),
    )
