"""Bits and bytes: packing, flags, checksums, the check of indices, and rounding."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .device import count_before, mix, one_of, popcount


@triton.jit(do_not_specialize=["count", "groups", "width"])
def pack_digits(values, out, count, groups, width, BLOCK: tl.constexpr):
    """Pack one slice (of up to eight bits) of a block of groups (of eight integers)."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = tl.program_id(1) * 8
    bits = tl.minimum(8, width - low)
    eight = tl.arange(0, 8)
    at = group[:, None] * 8 + eight[None, :]
    numbers = tl.load(values + at, mask=at < count, other=0).to(tl.int64)
    digits = (numbers >> low) & ((1 << bits) - 1)
    words = tl.sum(digits << (eight * bits)[None, :].to(tl.int64), 1)
    data = ((words[:, None] >> (eight * 8)[None, :].to(tl.int64)) & 255).to(tl.uint8)
    place = groups * low + group[:, None] * bits + eight[None, :]
    tl.store(out + place, data, mask=(group < groups)[:, None] & (eight < bits)[None, :])


@triton.jit(do_not_specialize=["count", "groups", "width", "length"])
def unpack_digits(data, out, count, groups, width, length, BLOCK: tl.constexpr):
    """Unpack all slices of a block of groups."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    eight = tl.arange(0, 8)
    numbers = tl.zeros([BLOCK, 8], tl.int64)
    for low in range(0, width, 8):
        bits = tl.minimum(8, width - low)
        place = groups * low + group[:, None] * bits + eight[None, :]
        inside = (group < groups)[:, None] & (eight < bits)[None, :] & (place < length)
        found = tl.load(data + place, mask=inside, other=0).to(tl.int64)
        words = tl.sum(found << (eight * 8)[None, :].to(tl.int64), 1)
        digits = words[:, None] >> (eight * bits)[None, :].to(tl.int64)
        numbers |= (digits & ((1 << bits) - 1)) << low
    at = group[:, None] * 8 + eight[None, :]
    tl.store(out + at, numbers, mask=at < count)


@triton.jit(do_not_specialize=["count", "limit"])
def raise_flags(positions, flags, count, limit, BLOCK: tl.constexpr):
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(positions + lanes, mask=lanes < count, other=-1).to(tl.int64)
    bits = (1 << (at % 32)).to(tl.int32)
    tl.atomic_or(flags + at // 32, bits, mask=(at >= 0) & (at < limit), sem="relaxed")


@triton.jit(do_not_specialize=["length"])
def count_flags(data, counts, length, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    found = popcount(tl.load(data + at, mask=at < length, other=0).to(tl.int32))
    tl.store(counts + block, tl.sum(found).to(tl.int64))


@triton.jit(do_not_specialize=["length", "count", "blocks"])
def place_flags(data, counts, out, length, count, blocks, BLOCK: tl.constexpr):
    """Write the positions of one block's flags, and its share of the padding after the last one."""
    block = tl.program_id(0).to(tl.int64)
    before = count_before(counts, 0, block, 1024)
    total = before + count_before(counts, block, blocks, 1024)
    at = block * BLOCK + tl.arange(0, BLOCK)
    rest = tl.load(data + at, mask=at < length, other=0).to(tl.int32)
    many = popcount(rest)
    place = before + tl.cumsum(many, 0) - many
    for _ in range(tl.max(many)):
        lowest = rest & -rest
        is_set = lowest != 0
        tl.store(out + place, at * 8 + popcount(lowest - 1), mask=is_set & (place < count))
        place += is_set.to(tl.int64)
        rest = rest ^ lowest
    share = (count + blocks - 1) // blocks
    last = tl.minimum(count, (block + 1) * share)
    for slot in range(tl.maximum(total, block * share), last, BLOCK):
        lanes = slot + tl.arange(0, BLOCK)
        tl.store(out + lanes, tl.zeros([BLOCK], tl.int64) + length * 8, mask=lanes < last)


@triton.jit
def checksum_of(words, at, count):
    """Return the contribution of some words to the checksum."""
    word = tl.load(words + at, mask=at < count, other=0)
    hashed = mix(word ^ ((at + 1) * -7046029254386353131))
    return tl.sum(tl.where(at < count, hashed, 0))


@triton.jit(do_not_specialize=["count"])
def checksum_block(words, sums, count, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + block, checksum_of(words, at, count))


@triton.jit(do_not_specialize=["key", "blocks"])
def checksum_end(sums, out, key: tl.int64, blocks):
    total = count_before(sums, 0, blocks, 1024)
    tl.store(out, mix(total ^ key))


@triton.jit
def breaks_order(indices, at, count, size):
    """Return which indices are out of range, or not greater than the one before."""
    here = tl.load(indices + at, mask=at < count, other=0)
    before = tl.load(indices + at - 1, mask=(at > 0) & (at < count), other=-1)
    is_rising = (here > before) | ((here == size) & (at > 0))
    return ((is_rising & (here <= size)) == 0) & (at < count)


@triton.jit(do_not_specialize=["count", "size"])
def check_ascending(indices, out, count, size, BLOCK: tl.constexpr):
    """Write 0 to `out` if a block of indices is not in order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if tl.max(breaks_order(indices, at, count, size).to(tl.int32)) > 0:
        tl.store(out, 0)


@triton.jit(
    do_not_specialize=[
        "messages",
        "indices",
        "values",
        "words",
        "index_count",
        "value_count",
        "size",
        "first",
        "blocks",
    ]
)
def inspect_block(
    found,
    messages,
    indices,
    values,
    words,
    index_count,
    value_count,
    size,
    first,
    blocks,
    MESSAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Check a block of one message: write its contribution to the checksum, and a code.

    A message's row of `found` has the checksum in the message, then the contributions of all
    blocks, then their codes. Code 1 means broken order, 2 a non-finite value, and 3 both.
    """
    block = tl.program_id(0).to(tl.int64)
    message = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    body = one_of(messages, message, MESSAGES).to(tl.pointer_type(tl.int64))
    entries = one_of(indices, message, MESSAGES).to(tl.pointer_type(tl.int64))
    numbers = one_of(values, message, MESSAGES).to(tl.pointer_type(tl.int32))
    found += (first + message) * (2 * blocks + 1)
    if block == 0:
        tl.store(found, tl.load(body + words))
    tl.store(found + 1 + block, checksum_of(body, at, words))
    code = tl.max(breaks_order(entries, at, index_count, size).to(tl.int32))
    sizes = tl.load(numbers + at, mask=at < value_count, other=0) & 0x7FFFFFFF
    code += 2 * (tl.max(sizes) >= 0x7F800000).to(tl.int32)
    tl.store(found + 1 + blocks + block, code)


@triton.jit(do_not_specialize=["key", "first", "blocks"])
def inspect_end(found, fine, key: tl.int64, first, blocks):
    """Combine the results of all blocks of one message."""
    LANES: tl.constexpr = 1024
    message = tl.program_id(0).to(tl.int64)
    found += message * (2 * blocks + 1)
    total = count_before(found + 1, 0, blocks, LANES)
    codes = tl.zeros([LANES], tl.int64)
    for at in range(0, blocks, LANES):
        lanes = at + tl.arange(0, LANES)
        codes |= tl.load(found + 1 + blocks + lanes, mask=lanes < blocks, other=0)
    checksum = mix(total ^ mix(mix(key ^ (first + message))))
    fine += message * 4
    tl.store(fine, checksum == tl.load(found))
    tl.store(fine + 1, tl.max(codes & 1) == 0)
    tl.store(fine + 2, tl.max(codes & 2) == 0)
    tl.store(fine + 3, 1)


@triton.jit(do_not_specialize=["count", "key"])
def round_at_random(wide, narrow, count, key: tl.int64, BLOCK: tl.constexpr):
    """Round stochastically. Four values share a random word, as in `reference`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(wide + at, mask=at < count, other=0).to(tl.int32, bitcast=True)
    chance = ((mix(at // 4 + key) >> (at % 4 * 16)) & 0xFFFF).to(tl.int32)
    rounded = bits + chance
    rounded = tl.where((rounded & 0x7F800000) != 0x7F800000, rounded, bits)
    tl.store(narrow + at, (rounded >> 16).to(tl.int16), mask=at < count)
