"""Thresholds: the exact magnitude that the wanted share of a strided sample reaches."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .columns import (
    BLOCK_COLUMNS,
    BLOCK_COUNT,
    BLOCK_FIRST,
    BLOCK_SEGMENT,
    FLOOR,
    LEFT,
    LOWEST,
    PREFIX,
    SAMPLE_COLUMNS,
    SAMPLE_KEEP,
    SAMPLE_LONGER,
    SAMPLE_STRIDE,
    SEGMENT_COLUMNS,
    SEGMENT_KEY,
    SEGMENT_LENGTH,
    SEGMENT_START,
)
from .device import magnitude, mix
from .rank import BINS, add_digit, is_last


@triton.jit
def sampling(samples, segments, segment, key):
    """Return the offset and stride of a segment's sample, and the rank of the threshold in it."""
    stride = tl.load(samples + segment * SAMPLE_COLUMNS + SAMPLE_STRIDE)
    length = tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_LENGTH)
    word = mix(tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_KEY) ^ key).to(
        tl.uint64, bitcast=True
    )
    offset = (word % stride.to(tl.uint64)).to(tl.int64)
    is_longer = (length - offset + stride - 1) // stride == tl.load(
        samples + segment * SAMPLE_COLUMNS + SAMPLE_LONGER
    )
    keep = tl.load(samples + segment * SAMPLE_COLUMNS + SAMPLE_KEEP + is_longer.to(tl.int64))
    return offset, stride, keep


@triton.jit
def sampled_at(
    before, addend, segments, segment, offset, stride, numbers, HAS_BEFORE: tl.constexpr
):
    """Return magnitudes of before + addend in a segment's sample, and which of them exist."""
    start = tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_START)
    places = start + offset + numbers * stride
    live = places < start + tl.load(segments + segment * SEGMENT_COLUMNS + SEGMENT_LENGTH)
    total = tl.load(addend + places, mask=live, other=0).to(tl.float32)
    if HAS_BEFORE:
        total = tl.load(before + places, mask=live, other=0) + total
    return magnitude(total), live


@triton.jit
def set_threshold(here, threshold):
    threshold = tl.maximum(threshold, 1)  # zeros are never sent
    tl.store(here + LOWEST, threshold)
    tl.store(here + FLOOR, threshold)


@triton.jit(do_not_specialize=["key"])
def bisect_sample(
    before,
    addend,
    segments,
    samples,
    numbers,
    key: tl.int64,
    state,
    HAS_BEFORE: tl.constexpr,
    STATE: tl.constexpr,
    SEEN: tl.constexpr,
):
    """Find the threshold of a segment bit by bit, from a sample that fits into one program."""
    segment = tl.load(numbers + tl.program_id(0))
    offset, stride, keep = sampling(samples, segments, segment, key)
    lanes = tl.arange(0, SEEN).to(tl.int64)
    sizes, live = sampled_at(before, addend, segments, segment, offset, stride, lanes, HAS_BEFORE)
    sizes = tl.where(live, sizes, -1)
    threshold = tl.zeros([], tl.int32)
    for turn in range(31):
        higher = threshold + (1 << 30 >> turn)
        reached = tl.sum((sizes >= higher).to(tl.int32))
        threshold = tl.where(reached >= keep, higher, threshold)
    set_threshold(state + segment * STATE, threshold.to(tl.int64))


@triton.jit(do_not_specialize=["key"])
def rank_sample(
    before,
    addend,
    segments,
    samples,
    blocks,
    key: tl.int64,
    state,
    histograms,
    seen,
    HAS_BEFORE: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find one digit of a threshold, from a block of a larger sample.

    The first round gathers the sample and reads a 32-byte sector of before and addend for every
    value. Later rounds read the gathered values.
    """
    block = tl.program_id(0).to(tl.int64)
    segment = tl.load(blocks + block * BLOCK_COLUMNS + BLOCK_SEGMENT)
    here = state + segment * STATE
    lanes = tl.arange(0, BLOCK)
    offset, stride, left = sampling(samples, segments, segment, key)
    prefix = tl.zeros_like(segment)
    if SHIFT + BITS == 31:
        numbers = tl.load(blocks + block * BLOCK_COLUMNS + BLOCK_FIRST) + lanes
        sizes, live = sampled_at(
            before, addend, segments, segment, offset, stride, numbers, HAS_BEFORE
        )
        tl.store(seen + block * BLOCK + lanes, tl.where(live, sizes, -1))
    else:
        prefix = tl.load(here + PREFIX)
        left = tl.load(here + LEFT)
        sizes = tl.load(seen + block * BLOCK + lanes)
        live = sizes >= 0
    digits = (sizes >> SHIFT) & ((1 << BITS) - 1)
    found = tl.histogram(digits, BINS, mask=live & (sizes >> (SHIFT + BITS) == prefix))
    histogram = histograms + segment * BINS
    tl.atomic_add(histogram + tl.arange(0, BINS), found, mask=found > 0, sem="relaxed")
    if is_last(here, tl.load(blocks + block * BLOCK_COLUMNS + BLOCK_COUNT)):
        threshold, _ = add_digit(here, histogram, prefix, left, BITS, BINS)
        if SHIFT == 0:
            set_threshold(here, threshold)
