"""The loops of a withdrawal: deposit a tile, take its candidates out, put the smaller ones back.

Candidates are kept as bits of float32 (`raw`) with their places, ascending.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .floors import FIRST, LENGTH, SAMPLE, learn, likely_floor, threshold
from .jit import Array, jit
from .numbers import (
    INFINITE,
    NEVER,
    NONE,
    PLAIN,
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

TILE = 8192  # coordinates of one round
SHORT = 8 * STRIPE  # a tile that is not worth a head and a rest


START, STOP, SPAN, PIECE, WHOLE = range(5)  # columns of a table of tiles
LEAP = 4 * STRIPE  # bytes
PAGE = 1024  # numbers


def workspace() -> tuple[Array, Array]:
    """What one thread works on, as `walk` takes it.

    It is made by the caller because compiled loops let go of arrays whose address is still in use,
    and it begins with a page of memory: what is written all the time must not cross the next one.
    """
    length = 2 * TILE + 6 * STRIPE
    space = np.zeros(length + PAGE, np.float32)
    begin = -space.ctypes.data % (4 * PAGE) // 4
    space = space[begin : begin + length]
    _divide(space)[1][:] = -0.0
    return space, np.zeros(TILE // STRIPE + 2, np.uint64)


@jit
def _divide(space: Array) -> tuple[Array, Array, Array, Array]:
    """Five stripes for less than one, a stripe that adds nothing, and two tiles.

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

    Of equal ones those on the left are kept. Returns the smallest magnitude kept.
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
    """A stripe of which there are only `count` numbers."""
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
    """Write down the sums of a stripe whose bits are set in the word, and their places.

    Most words have two at most: these are written without asking, and what is none is overwritten
    by the next.
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
    """How many numbers of a tile come before the first line of memory that it fills."""
    return min(length, ((-goal) & 63) >> 2) if past_cache else np.int64(0)


@jit
def _deposit(
    left: Any,
    step: Any,
    right: Any,
    goal: Any,
    start: int,
    length: int,
    floor: Any,
    past_cache: bool,
    marks: Array,
    rest: Array,
    raw: Array,
    places: Array,
    at: Any,
) -> Any:
    """Add a tile up, given by addresses; a step of zero adds the same stripe everywhere.

    Taken out is what reaches the floor, and what is marked: the first word of `marks` is for the
    head, in its upper bits, and the others follow. They go to `raw` and `places`, up to the first
    number returned; the others are the sum of squares, and whether a sum is not finite.
    """
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
def _sum_at(left: Any, step: Any, right: Any, place: Any) -> Any:
    """One sum of a tile."""
    first = float32_at(left + (4 * place if step else np.int64(0)), np.int64(1))
    return np.float32(first[0] + float32_at(right + 4 * place, np.int64(1))[0])


@jit
def walk(
    tiles: Array,
    before: Array,
    addend: Array,
    halves: Array,
    kind: int,
    after: Array,
    dense: Array,
    segments: Array,
    names: Array,
    strides: Array,
    key: int,
    floors: Array,
    limits: Array,
    raw: Array,
    places: Array,
    found: Array,
    hits: Array,
    chosen: Array,
    values: Array,
    squares: Array,
    past_cache: bool,
    buffer: Array,
    space: Array,
    marks: Array,
) -> Any:
    """Deposit tiles and withdraw from them; returns the first non-finite parameter, or -1.

    Whole tiles move to `dense`. Of every segment at most `limits` candidates that reach `floors`
    are left in `raw` and `places`, `found` of them; `hits`, if wanted, is how many reached it. With
    `strides`, floors are thresholds found on a sample, just before the segment is walked over,
    which brings it into the cache. Without floors, what lies at the coordinates `chosen` goes to
    `values`. `squares` are the tiles'.
    """
    bits = after.view(np.uint32)
    value_bits = values.view(np.uint32)
    rest, blank, wide, _ = _divide(space)
    left, step = address(blank), np.int64(0)
    non_finite = -1
    cursor = 0
    segment, begin, at = -1, np.int64(0), np.int64(0)
    floor = NEVER
    for tile in range(len(tiles)):
        start, stop, param = tiles[tile, START], tiles[tile, STOP], tiles[tile, SPAN]
        length = stop - start
        picks = tiles[tile, PIECE] >= 0 and len(floors) > 0
        if not picks:
            floor = NEVER
        elif tiles[tile, PIECE] != segment:
            if segment >= 0:
                if at - begin > limits[segment]:
                    keep_largest(raw, places, begin, at, limits[segment], bits)
                    at = begin + limits[segment]
                found[segment] = at - begin
            segment = tiles[tile, PIECE]
            if len(strides):
                floors[segment] = threshold(
                    before,
                    addend,
                    halves,
                    kind,
                    segments[segment],
                    names[segment],
                    strides[segment],
                    key,
                    floors[segment],
                    buffer,
                )
            begin, floor = at, floors[segment]
        elif at - begin + length > 2 * limits[segment] + 2 * TILE:
            least = keep_largest(raw, places, begin, at, limits[segment], bits)
            at = begin + limits[segment]
            floor = np.uint32(least + np.uint32(1))  # equal ones come too late

        if len(before):
            left, step = address(before) + 4 * start, np.int64(LEAP)
        if kind == PLAIN:
            right = address(addend) + 4 * start
        else:
            widen(halves[start:stop], kind, wide.view(np.uint32))
            right = address(wide)
        goal = address(after) + 4 * start
        whole = tiles[tile, WHOLE]
        if whole >= 0:
            goal = address(dense) + 4 * whole
            after[start:stop] = np.float32(0)
        first, last = cursor, at
        is_past = past_cache and length >= SHORT
        shift = STRIPE - _head(goal, length, is_past) - start
        while cursor < len(chosen) and chosen[cursor] < stop:
            place = chosen[cursor] + shift
            marks[place >> 6] |= np.uint64(1) << np.uint64(place & 63)
            cursor += 1
        at, total, is_bad = _deposit(
            left, step, right, goal, start, length, floor, is_past, marks, rest, raw, places, at
        )
        squares[tile] = total if np.isfinite(total) else _exact_squares(float32_at(right, length))
        if is_bad and non_finite < 0:
            non_finite = param
        if not picks:
            at = last
            for n in range(first, cursor):
                value_bits[n] = raw[at + n - first]
                marks[(chosen[n] + shift) >> 6] = np.uint64(0)
            continue
        if len(hits):
            hits[segment] += at - last
            if floor > floors[segment]:  # those between the two floors were passed over
                for n in range(length):
                    bit = np.float32(_sum_at(left, step, right, n)).view(np.uint32)
                    size = magnitude(bit)
                    hits[segment] += size >= floors[segment] and size < floor
    finish_writing()
    if segment >= 0:
        if at - begin > limits[segment]:
            keep_largest(raw, places, begin, at, limits[segment], bits)
            at = begin + limits[segment]
        found[segment] = at - begin
    return non_finite


@jit
def _search(
    after: Array,
    first: int,
    length: int,
    floor: Any,
    limit: int,
    raw: Array,
    places: Array,
    at: Any,
    space: Array,
    marks: Array,
) -> Any:
    """Take candidates out of a segment that is deposited already; as `walk` does."""
    bits = after.view(np.uint32)
    rest, blank, _, goals = _divide(space)
    left, step, no = address(blank), np.int64(0), length < 0
    begin = at
    for start in range(first, first + length, TILE):
        stop = min(start + TILE, first + length)
        if at - begin + stop - start > 2 * limit + 2 * TILE:
            least = keep_largest(raw, places, begin, at, limit, bits)
            floor = np.uint32(least + np.uint32(1))
            at = begin + limit
        here = address(after) + 4 * start
        goal, last = address(goals), at
        at, _, _ = _deposit(
            left, step, here, goal, start, stop - start, floor, no, marks, rest, raw, places, at
        )
        for n in range(last, at):
            bits[places[n]] = np.uint32(0)
    if at - begin > limit:
        keep_largest(raw, places, begin, at, limit, bits)
        at = begin + limit
    return at


@jit
def settle(
    segments: Array,
    limits: Array,
    is_exact: bool,
    after: Array,
    raw: Array,
    places: Array,
    found: Array,
    kth: Array,
    trends: Array,
    falls: Array,
    tally: Array,
    indices: Array,
    values: Array,
    space: Array,
    marks: Array,
) -> Any:
    """Write out the candidates of every segment, ascending; returns how many.

    Where threads found more than the limit, the largest are kept. Where exactly `limits` are wanted
    and fewer were found, the floor was too high: then a sample of the segment gives a lower one,
    and if that fails too, all are candidates. `tally` counts floors foreseen that were right and
    wrong.
    """
    bits = after.view(np.uint32)
    value_bits = values.view(np.uint32)
    kth_values = kth.view(np.float32)
    spare = np.int64(0)
    for segment in range(len(segments)):
        spare += found[segment]
    begin, out = np.int64(0), np.int64(0)
    for segment in range(len(segments)):
        first, length, limit = segments[segment, FIRST], segments[segment, LENGTH], limits[segment]
        low, high = begin, begin + found[segment]
        begin = high
        is_missed = is_exact and found[segment] < limit
        if found[segment] > limit:
            keep_largest(raw, places, low, high, limit, bits)
            high = low + limit
        elif is_missed:
            for n in range(low, high):
                bits[places[n]] = raw[n]
            stride = max(1, length // SAMPLE)
            sample = bits[first : first + length : stride].copy()
            floor = likely_floor(sample, limit, length)
            low = spare
            high = _search(after, first, length, floor, limit, raw, places, low, space, marks)
            if high - low < limit:
                for n in range(low, high):
                    bits[places[n]] = raw[n]
                high = _search(after, first, length, NONE, limit, raw, places, low, space, marks)
        if is_exact:
            last, was_known = kth_values[segment], kth[segment] < INFINITE
            kth[segment] = smallest(raw[low:high])
            if was_known:
                tally[np.int64(is_missed)] += 1
                learn(kth_values[segment], last, trends, falls, segment)
        for n in range(high - low):
            indices[out + n] = places[low + n]
            value_bits[out + n] = raw[low + n]
        out += high - low
    return out
