"""Random coordinates, drawn in time proportional to their number."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...randomness import signed
from ...segments import Segments, SegmentTable
from ...workspace import Workspace
from .jit import CPU, Array, array, jit, mix
from .stripes import bits_set, lowest_bit

_POSITIVE = np.uint64((1 << 63) - 1)
BATCH = 256
_EXACT = 1 << 12  # from this bound on, the quotient of 63 bits fits in a float64


class _Columns(NamedTuple):
    """A `SegmentTable` as arrays."""

    keys: Array
    starts: Array
    lengths: Array
    counts: Array

    @staticmethod
    def of(table: SegmentTable) -> _Columns:
        return _Columns(*(array(getattr(table, name)) for name in _Columns._fields))


def random_k(segments: Segments, key: int, device: torch.device, work: Workspace) -> Tensor:
    table = segments.table(CPU, work)
    longest = max((segment.length for segment in segments.sparse), default=0)
    marks = work.kept(segments, "marks", lambda: np.empty(longest // 64 + 1, np.uint64))
    count = table.owner.numel()
    indices = torch.empty(count + 2, dtype=torch.int64)  # room for the unconditional writes
    _random_k(_Columns.of(table), signed(key), marks, array(indices))
    return indices[:count].to(device)


def block_random_k(segments: Segments, key: int, device: torch.device, work: Workspace) -> Tensor:
    table = segments.table(CPU, work)
    indices = torch.empty(table.owner.numel(), dtype=torch.int64)
    _block_random_k(_Columns.of(table), signed(key), array(indices))
    return indices.to(device)


@jit
def _below(word: Any, bound: int, inverse: float) -> Any:
    """Return the low 63 bits modulo `bound`. The floating-point quotient is off by at most two."""
    number = np.int64(word & _POSITIVE)
    if bound < _EXACT:
        return number % bound
    rest = number - np.int64(number * inverse) * bound
    while rest < 0:
        rest += bound
    while rest >= bound:
        rest -= bound
    return rest


@jit
def _write_places(word: Any, base: Any, places: Array, at: Any) -> Any:
    """Write the positions of the set bits of a word. Return the end of the output.

    Most words have at most two set bits, so two positions are always written; the next word
    overwrites the surplus.
    """
    one = np.uint64(1)
    places[at] = base + lowest_bit(word)
    others = word & (word - one)
    places[at + 1] = base + lowest_bit(others)
    others &= others - one
    later = at + 2
    while others != np.uint64(0):
        places[later] = base + lowest_bit(others)
        later += 1
        others &= others - one
    return at + bits_set(word)


@jit
def _random_k(table: _Columns, key: int, marks: Array, out: Array) -> None:
    """Mark the chosen coordinates, or the others if they are fewer, and read the marks in order.

    Uses one bit per coordinate of a segment: 125 KB per million coordinates, which stay in the
    cache.
    """
    keys, starts, lengths, counts = table.keys, table.starts, table.lengths, table.counts
    at = np.int64(0)
    one = np.uint64(1)
    drawn = np.empty(BATCH, np.int64)
    for segment in range(len(keys)):
        start, length, count = starts[segment], lengths[segment], counts[segment]
        stream = mix(np.uint64(keys[segment] ^ key))
        inverse = 1.0 / length
        leaves_out = count > length - count
        missing = length - count if leaves_out else count
        marks[: (length + 63) >> 6] = np.uint64(0)  # also loads them into the cache
        while missing > 0:
            batch = min(missing, BATCH)  # batched so that no draw waits for the previous mark
            for n in range(batch):
                drawn[n] = _below(mix(stream + np.uint64(n)), length, inverse)
            stream += np.uint64(batch)
            for n in range(batch):
                place = drawn[n]
                bit = one << np.uint64(place & 63)
                missing -= (marks[place >> 6] & bit) == np.uint64(0)
                marks[place >> 6] |= bit
        for number in range((length + 63) >> 6):
            word = marks[number]
            if leaves_out:
                word = ~word
                if length - 64 * number < 64:
                    word &= (one << np.uint64(length - 64 * number)) - one
            at = _write_places(word, start + 64 * number, out, at)


@jit
def _block_random_k(table: _Columns, key: int, out: Array) -> None:
    keys, starts, lengths, counts = table.keys, table.starts, table.lengths, table.counts
    at = 0
    for segment in range(len(keys)):
        start, length, count = starts[segment], lengths[segment], counts[segment]
        begin = _below(mix(np.uint64(keys[segment] ^ key)), length, 1.0 / length)
        wrapped = max(0, begin + count - length)
        for n in range(wrapped):
            out[at + n] = start + n
        for n in range(wrapped, count):
            out[at + n] = start + begin + n - wrapped
        at += count
