"""Floors: the smallest magnitude of a candidate.

For `over_threshold` floors are exact. For `top_k` they are guesses; a wrong one only costs time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .jit import Array, jit, mix
from .numbers import INFINITE, NONE, PLAIN, Sources, kth_magnitude, magnitude, widened

SAMPLE = 1 << 14  # size of the sample from which the first floor of a segment is guessed
SMALL = 1 << 12  # smaller segments need no guess

BELIEVED = 0.25  # the largest change that is taken into account
GOES_ON = 0.7  # the share of a rise that is expected to continue
FORGET = 0.7  # the share of an error that is remembered after a step
GUESSED = np.uint32(1 << 22)  # as bits: about half of a magnitude


class SegmentColumns(NamedTuple):
    """What the loops need about segments, and about the samples that thresholds come from."""

    starts: Array
    lengths: Array
    counts: Array
    limits: Array  # the largest number of entries to take out of a segment
    names: Array  # keys
    strides: Array  # of the samples; empty if floors do not come from samples
    key: int  # of the step


class Guesses(NamedTuple):
    """What is known about each segment's k-th magnitude."""

    kth: Array  # the last one, as bits; infinite before the first
    trends: Array  # the factor by which it changes
    falls: Array  # how far it was below the guess recently
    tally: Array  # numbers of floors that were low enough, and that were too high


@jit
def _sample(sources: Sources, first: int, count: int, stride: int, floor: Any, out: Array) -> Array:
    """Return the bits of before + addend at every `stride`th coordinate, where they reach the
    floor.

    Reads a cache line of every source for each of the `count` coordinates that are not neighbours.
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
    """Return a floor that somewhat more than `count` of `length` magnitudes should reach."""
    wanted = np.int64(np.ceil(len(sample) * 1.5 * count / length)) + 8
    return kth_magnitude(sample, wanted) if wanted < len(sample) else np.uint32(0)


@jit
def learn(kth: float, last: float, guesses: Guesses, segment: int) -> None:
    """Record how a segment's k-th magnitude changed, and how far below the guess it was."""
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
    """Guess floors from the last k-th magnitudes where they are known, else from a sample.

    The guess assumes that magnitudes grow or shrink as in the last step. The floor is lower than
    the guess by twice the recent error, and by more where `count` is small, because few entries
    fluctuate more.
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
    """Return the magnitude that `count` in `length` of a strided sample of a segment reach; not
    zero.

    The threshold of the last step, `last`, tells which part of the sample can be left out.
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
