"""Packed integers, flags and checksums as plain loops. `..bits` defines the format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...randomness import join, mix_int
from ...segments import Segments
from .. import reference
from ..bits import ascending_flags, packed_bytes
from .jit import GAMMA, Array, array, is_flat, jit, mix
from .numbers import INFINITE, MAGNITUDE
from .stripes import bits_set, lowest_bit

_MASK = (1 << 64) - 1


def pack(values: Tensor, width: int) -> Tensor:
    data = torch.empty(packed_bytes(values.numel(), width), dtype=torch.uint8)
    _pack(array(values.contiguous().to(torch.int64)), width, array(data))
    return data


def unpack(data: Tensor, count: int, width: int) -> Tensor:
    _check_length(data, count, width)
    values = torch.zeros(count, dtype=torch.int64)
    _unpack(array(data.contiguous()), width, array(values))
    return values


def _check_length(data: Tensor, count: int, width: int) -> None:
    if data.numel() < packed_bytes(count, width):
        raise ValueError(f"{data.numel()} bytes are too few for {count} integers of {width} bits")


def set_flags(positions: Tensor, count: int) -> Tensor:
    data = torch.zeros(-(-count // 8), dtype=torch.uint8)
    _set_flags(array(positions.contiguous()), array(data))
    return data


def find_flags(data: Tensor, count: int) -> Tensor:
    found = torch.empty(count, dtype=torch.int64)
    _find_flags(array(data.contiguous()), array(found))
    return found


def write_ascending(indices: Tensor, width: int, segments: Segments) -> Tensor:
    count = indices.numel()
    split = packed_bytes(count, width)
    flags = packed_bytes(ascending_flags(count, segments.size, width), 1)
    data = torch.empty(split + flags, dtype=torch.uint8)
    row = array(data)
    _write_ascending(array(indices.contiguous()), width, row[:split], row[split:])
    return data


def read_ascending(data: Tensor, width: int, segments: Segments) -> Tensor:
    _check_length(data, segments.capacity, width)
    split = packed_bytes(segments.capacity, width)
    indices = torch.empty(segments.capacity, dtype=torch.int64)
    row = array(data.contiguous())
    _read_ascending(row[:split], row[split:], width, segments.size, array(indices))
    return indices


def checksum(data: Tensor, key: int) -> Tensor:
    words = array(data.contiguous().view(torch.int64)).view(np.uint64)
    return torch.tensor(_checksum(words, np.uint64(mix_int(key))))


def narrow(wide: Tensor, narrow: Tensor, key: int) -> None:
    words = array(narrow.view(torch.int16)).view(np.uint16)
    _narrow(array(wide).view(np.uint32), np.uint64(key & _MASK), words)


def is_ascending(indices: Tensor, size: int) -> Tensor:
    return torch.tensor(bool(rises(array(indices.contiguous()), size)))


def inspect(
    messages: Sequence[Tensor],
    entries: Sequence[tuple[Tensor, Tensor]],
    key: int,
    first: int,
    nbytes: int,
    size: int,
) -> Tensor:
    if not all(
        message.numel() == nbytes
        and is_flat(message, torch.uint8)
        and is_flat(indices, torch.int64)
        and is_flat(values, torch.float32)
        for message, (indices, values) in zip(messages, entries, strict=True)
    ):
        return reference.inspect(
            messages,
            entries,
            key,
            first,
            nbytes,
            size,
            checksum=checksum,
            is_ascending=is_ascending,
        )
    fine = torch.empty((len(messages), 4), dtype=torch.bool)
    rows = array(fine)
    for number, (message, (indices, values)) in enumerate(zip(messages, entries, strict=True)):
        words = array(message).view(np.uint64)
        own = np.uint64(mix_int(join(key, first + number)))
        _inspect(words, own, array(indices), size, array(values).view(np.uint32), rows[number])
    return fine


@jit
def _narrow(bits: Array, key: Any, words: Array) -> None:
    """Round stochastically. Four numbers share a random word: 16 bits each, lowest first."""
    for group in range((len(bits) + 3) // 4):
        chance = mix(key + np.uint64(group))
        for n in range(4 * group, min(4 * group + 4, len(bits))):
            rounded = np.uint32(bits[n] + np.uint32(chance & np.uint64(0xFFFF)))
            is_finite = (rounded & INFINITE) != INFINITE
            words[n] = (rounded if is_finite else bits[n]) >> np.uint32(16)
            chance >>= np.uint64(16)


@jit
def _pack(values: Array, width: int, data: Array) -> None:
    """Pack integers. Reads them once per eight bits of width, and writes each byte once."""
    full = len(values) // 8
    at = 0
    for low in range(0, width, 8):
        bits = min(8, width - low)
        mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
        for group in range((len(values) + 7) // 8):
            word = np.uint64(0)
            if group < full:
                eight = values[8 * group : 8 * group + 8]
                for n in range(8):
                    digit = (np.uint64(eight[n]) >> np.uint64(low)) & mask
                    word |= digit << np.uint64(n * bits)
            else:
                for n in range(len(values) - 8 * full):
                    digit = (np.uint64(values[8 * full + n]) >> np.uint64(low)) & mask
                    word |= digit << np.uint64(n * bits)
            for n in range(bits):
                data[at + n] = np.uint8((word >> np.uint64(8 * n)) & np.uint64(255))
            at += bits


@jit
def _word(data: Array, at: int) -> Any:
    """Load eight bytes starting at `at` as a little-endian word, zero-padded past the end."""
    word = np.uint64(0)
    if at + 8 <= len(data):
        eight = data[at : at + 8]
        for n in range(8):
            word |= np.uint64(eight[n]) << np.uint64(8 * n)
    else:
        for n in range(len(data) - at):
            word |= np.uint64(data[at + n]) << np.uint64(8 * n)
    return word


@jit
def _unpack(data: Array, width: int, values: Array) -> None:
    """OR the unpacked bits into `values`, whose low bits must be zero: one pass per eight bits."""
    full = len(values) // 8
    at = 0
    for low in range(0, width, 8):
        bits = min(8, width - low)
        mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
        for group in range((len(values) + 7) // 8):
            word = _word(data, at)
            at += bits
            if group < full:
                eight = values[8 * group : 8 * group + 8]
                for n in range(8):
                    digit = (word >> np.uint64(n * bits)) & mask
                    eight[n] |= np.int64(digit << np.uint64(low))
            else:
                for n in range(len(values) - 8 * full):
                    digit = (word >> np.uint64(n * bits)) & mask
                    values[8 * full + n] |= np.int64(digit << np.uint64(low))


@jit
def _set_flags(positions: Array, data: Array) -> None:
    count = 8 * len(data)
    for position in positions:
        if 0 <= position < count:
            data[position >> 3] |= np.uint8(1 << (position & 7))


@jit
def _find_flags(data: Array, found: Array) -> bool:
    """Write the positions of set flags to `found`. Return whether there are too many to fit."""
    filled = 0
    for number in range((len(data) + 7) // 8):
        word = _word(data, 8 * number)
        many = bits_set(word)
        capacity = found[filled : filled + many]
        for n in range(len(capacity)):
            capacity[n] = 64 * number + lowest_bit(word)
            word &= word - np.uint64(1)
        if len(capacity) < many:
            return True
        filled += many
    found[filled:] = 8 * len(data)
    return False


@jit
def _write_ascending(indices: Array, width: int, low: Array, flags: Array) -> None:
    _pack(indices, width, low)
    flags[:] = 0
    word, place = np.uint64(0), np.int64(0)
    for n in range(len(indices)):
        position = (indices[n] >> width) + n
        if position >> 6 != place:
            _raise_flags(word, place, flags)
            word, place = np.uint64(0), position >> 6
        word |= np.uint64(1) << np.uint64(position & 63)
    _raise_flags(word, place, flags)


@jit
def _raise_flags(word: Any, place: Any, flags: Array) -> None:
    """Set the flags of 64-bit word number `place`, ignoring flags outside the buffer."""
    for at in range(max(0, 8 * place), min(8 * place + 8, len(flags))):
        flags[at] |= np.uint8((word >> np.uint64(8 * (at - 8 * place))) & np.uint64(255))


@jit
def _read_ascending(low: Array, flags: Array, width: int, size: int, indices: Array) -> None:
    has_more = _find_flags(flags, indices)
    for n in range(len(indices)):
        indices[n] = (indices[n] - n) << width
    _unpack(low, width, indices)
    if has_more:
        indices[-1] = size + 1


@jit
def _checksum(words: Array, key: Any) -> Any:
    total = np.uint64(0)
    for n in range(len(words)):  # a running position would prevent vectorisation
        total += mix(words[n] ^ (np.uint64(n + 1) * GAMMA))
    return np.int64(mix(total ^ key))


@jit
def rises(indices: Array, size: int) -> bool:
    """Return whether indices strictly ascend within range, up to the padding `size` at the end."""
    if len(indices) == 0:
        return True
    wrong = np.int64(indices[0] < 0) + np.int64(indices[0] > size)
    for n in range(1, len(indices)):
        rises = (indices[n] > indices[n - 1]) | (indices[n] == size)
        wrong += np.int64(not rises) | np.int64(indices[n] > size)
    return bool(wrong == 0)


@jit
def _inspect(words: Array, key: Any, indices: Array, size: int, bits: Array, row: Array) -> None:
    """Write to `row` whether the checksum matches, the indices are valid and the values are finite.

    The last word of a message is its checksum. Values are given as bits. Makes one pass over each
    array.
    """
    row[0] = _checksum(words[:-1], key) == np.int64(words[-1])
    row[1] = rises(indices, size)
    largest = np.uint32(0)
    for n in range(len(bits)):
        largest = max(largest, np.uint32(bits[n] & MAGNITUDE))
    row[2] = largest < INFINITE
    row[3] = True
