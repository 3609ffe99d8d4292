"""The loops of a selection: accumulate a tile, take its candidates out, put surplus ones back.

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
SHORT = 8 * STRIPE  # a shorter tile is not worth a head and a rest
LEAP = 4 * STRIPE  # bytes
PAGE = 1024  # numbers


class Tiles(NamedTuple):
    """The tiles of one thread, and results about each of them."""

    starts: Array
    stops: Array
    params: Array
    segments: Array  # -1 where the segment is sent densely
    dense: Array  # where the values of such a tile begin among the dense values, or else -1
    squares: Array  # written: the sum of squares of the addend


class Candidates(NamedTuple):
    """Entries that were taken out because they reach a floor, segment by segment."""

    raw: Array  # the values' bits
    places: Array
    found: Array  # how many of them are in each segment


class Picks(NamedTuple):
    """Entries that are taken out because of their position."""

    places: Array
    values: Array  # written


class Scratch(NamedTuple):
    """Memory of one thread, small enough for its caches."""

    space: Array  # see `_divide`
    marks: Array  # a bit for every picked coordinate of a tile; all zero between two tiles
    sample: Array

    @staticmethod
    def make() -> Scratch:
        """Create it outside of compiled loops, which free arrays whose address is still in use.

        It begins at a page boundary: memory that is written all the time must not cross into
        another page.
        """
        length = 2 * TILE + 6 * STRIPE
        space = np.zeros(length + PAGE, np.float32)
        begin = -space.ctypes.data % (4 * PAGE) // 4
        space = space[begin : begin + length]
        _divide(space)[1][:] = -0.0
        return Scratch(space, np.zeros(TILE // STRIPE + 2, np.uint64), np.empty(0, np.uint32))


class Span(NamedTuple):
    """A tile by its addresses: goal = left + right. With a step of 0, `left` is the same stripe."""

    left: Any
    step: Any
    right: Any
    goal: Any
    start: Any  # its first coordinate
    length: Any


@jit
def _divide(space: Array) -> tuple[Array, Array, Array, Array]:
    """Return five stripes as buffers, a stripe that adds nothing, and two tiles.

    -0 adds nothing to any number, not even to -0.
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
    """Keep the `count` largest of the candidates in [begin, end), and put the others back.

    Of equal candidates, those at lower positions are kept. Returns the smallest magnitude kept.
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
    """Accumulate a stripe of only `count` numbers."""
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
    """Write the sums of a stripe whose bits are set in the word, and their positions.

    Most words have at most two. Two are therefore written unconditionally, and a sum whose bit is
    not set is overwritten by the next.
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
    """Return how many numbers of a tile come before the first cache line that it fills."""
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
    """Accumulate a tile, and take out what reaches the floor and what is marked.

    The first word of `marks` is for the head, in its upper bits, and the others follow. Entries
    that are taken out go to `raw` and `places`. Returns their end, the sum of squares, and whether
    a sum is not finite. Reads left and right once and writes goal once, past the cache if asked,
    without reading it first.
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
    """Mark the positions before `stop`. Return the number of the next one."""
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
    """Accumulate tiles and take candidates out. Return the first non-finite parameter, or -1.

    Dense tiles move to `dense`. At most the limit of each segment's entries that reach `floors` are
    left in `candidates`. With strides, floors are thresholds, estimated on a sample just before the
    segment is processed, which also brings the segment into the cache. Without floors, `picks` are
    taken out.

    Memory: reads before and addend and writes after, once each; a large `after` past the cache. A
    dense tile is written twice, as values and as zeros. All else stays in the cache.
    """
    bits = after.view(np.uint32)
    value_bits = picks.values.view(np.uint32)
    # Unpacked once: numba counts references whenever the loop looks into a struct.
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
            floor = np.uint32(least + np.uint32(1))  # equal ones come later and do not count
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
    """Call `walk` with the fields of its arguments as plain tuples.

    Numba needs about a microsecond more for every named tuple that Python hands over, which is
    several percent of the time for a million values.
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
    """Take candidates out of a segment that is accumulated already, as `walk` does.

    Reads the segment once more. Only positions of candidates are written.
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
    """Find a segment's candidates again, after all other candidates. Return their end.

    A sample of the segment gives a floor. If that is too high as well, all entries are candidates.
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
    """Write the candidates of every segment, ascending. Return how many there are.

    Where threads found more than the limit, the largest are kept. If exactly the limit is wanted
    and fewer were found, the floor was too high, and the segment is searched again.

    Memory: reads and writes only the candidates, and reads the segments that are searched again.
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
