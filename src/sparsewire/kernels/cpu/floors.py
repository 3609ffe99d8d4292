"""Floors: the smallest magnitude at which an entry becomes a candidate.

Floors are exact for `over_threshold` and guesses for `top_k`, where a wrong guess only costs time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .jit import Array, jit, mix
from .numbers import INFINITE, NONE, PLAIN, Sources, kth_magnitude, magnitude, widened

SAMPLE = 1 << 14  # sample size for the first guess of a segment's floor
SMALL = 1 << 12  # smaller segments need no guess

BELIEVED = 0.25  # the largest relative change that is taken into account
GOES_ON = 0.7  # the share of a rise that is expected to continue
FORGET = 0.7  # the decay per step of the recorded error
GUESSED = np.uint32(1 << 22)  # in bits: half a binade, a factor of about 0.7


class SegmentColumns(NamedTuple):
    """Columns of the segment table, and the sampling parameters for thresholds."""

    starts: Array
    lengths: Array
    counts: Array
    limits: Array  # the largest number of entries to take out of a segment
    names: Array  # hashed names, for random choices
    strides: Array  # sampling strides; empty if floors are not sampled thresholds
    key: int  # the random key of the step


class Guesses(NamedTuple):
    """Running estimates of each segment's k-th magnitude."""

    kth: Array  # the last k-th magnitude, as bits; infinite before the first step
    trends: Array  # the expected factor of change per step
    falls: Array  # the recent relative shortfall below the guess
    tally: Array  # the numbers of floors that were low enough and too high


@jit
def _sample(sources: Sources, first: int, count: int, stride: int, floor: Any, out: Array) -> Array:
    """Sample before + addend at a stride. Return the bits of magnitudes that reach the floor.

    Unless the stride is small, each of the `count` samples reads its own cache line per source.
    """
    before, addend, halves = sources.before, sources.addend, sources.halves
    at = 0
    keeps = len(before) > 0
    for n in range(count):
        place = first + n * stride
        value = np.float32(0)
        if sources.kind == PLAIN:
            value = addend[place]
        else:
            value = np.uint32(widened(halves[place], sources.kind)).view(np.float32)
        if keeps:
            value = np.float32(value + before[place])
        bits = np.float32(value).view(np.uint32)
        out[at] = bits
        at += magnitude(bits) >= floor
    return out[:at]


@jit
def likely_floor(sample: Array, count: int, length: int) -> Any:
    """Estimate a floor that slightly more than `count` of `length` magnitudes reach."""
    wanted = np.int64(np.ceil(len(sample) * 1.5 * count / length)) + 8
    return kth_magnitude(sample, wanted) if wanted < len(sample) else np.uint32(0)


@jit
def learn(kth: float, last: float, guesses: Guesses, segment: int) -> None:
    """Update a segment's trend and shortfall from its new k-th magnitude."""
    trends, falls = guesses.trends, guesses.falls
    if last > 0 and kth > 0:
        fall = 1 - kth / (last * trends[segment])
        falls[segment] = max(FORGET * falls[segment], min(fall, BELIEVED))
        change = min(max(kth / last - 1, -BELIEVED), BELIEVED)
        trends[segment] = 1 + (GOES_ON * change if change > 0 else change)


@jit
def guess_floors(
    sources: Sources, segments: SegmentColumns, guesses: Guesses, buffer: Array, floors: Array
) -> None:
    """Guess each floor from the last k-th magnitude if known, otherwise from a sample.

    The guess extrapolates the last step's change. The floor is lower than the guess by twice the
    recent error, plus a margin that grows as `count` shrinks, because small counts fluctuate more.
    """
    kth, trends, falls = guesses.kth, guesses.trends, guesses.falls
    kth_values = kth.view(np.float32)
    floor_values = floors.view(np.float32)
    for segment in range(len(segments.starts)):
        length, count = segments.lengths[segment], segments.counts[segment]
        floors[segment] = np.uint32(0)
        if kth[segment] < INFINITE:
            margin = 0.02 + 2 * falls[segment] + 0.3 / np.sqrt(count)
            floor_values[segment] = np.float32(kth_values[segment] * trends[segment] * (1 - margin))
        elif length >= SMALL and 8 * count < length:
            stride = length // SAMPLE + 1
            first, seen = segments.starts[segment], length // stride
            sample = _sample(sources, first, seen, stride, NONE, buffer)
            floors[segment] = likely_floor(sample, count, length)


@jit
def start_guesses(sources: Any, segments: Any, guesses: Any, buffer: Array, floors: Array) -> None:
    """Call `guess_floors` with plain tuples, as `walk.start_walk` does."""
    guess_floors(Sources(*sources), SegmentColumns(*segments), Guesses(*guesses), buffer, floors)


@jit
def threshold(
    sources: Sources, segments: SegmentColumns, segment: int, last: Any, buffer: Array
) -> Any:
    """Estimate the `count`-th largest magnitude of a segment from a strided sample; never zero.

    `last`, the threshold of the last step, rules out most of the sample in advance.
    """
    first, length = segments.starts[segment], segments.lengths[segment]
    stride = segments.strides[segment]
    word = mix(mix(np.uint64(segments.key)) ^ np.uint64(segments.names[segment]))
    begin = first + np.int64(word % np.uint64(stride))
    seen = (first + length - begin + stride - 1) // stride
    keep = np.int64(max(1.0, np.rint(seen * segments.counts[segment] / length)))
    floor = np.uint32(last - min(last, GUESSED))
    large = _sample(sources, begin, seen, stride, floor, buffer)
    if len(large) < keep:
        large = _sample(sources, begin, seen, stride, NONE, buffer)
    return max(np.uint32(1), kth_magnitude(large, keep))
