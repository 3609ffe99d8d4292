"""Block norms, computed in one pass over the gradient, and the blocks with the largest norms."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...segments import Segments
from ...workspace import Workspace
from .. import reference
from ..blocks import BlockTable
from .extract import is_addable, sources_of
from .jit import CPU, Array, array, is_flat, jit, parts_for, share_out
from .numbers import INFINITE, PLAIN, Sources, kth_magnitude, reaching, widen


def block_norms(
    before: Tensor | None, addend: Tensor, segments: Segments, block: int, work: Workspace
) -> Tensor:
    if not is_addable(before, addend, segments):
        return reference.block_norms(before, addend, segments, block, work)
    table = BlockTable.of(segments, block, CPU, work)
    starts, stops = array(table.starts), array(table.stops)
    norms = np.empty(len(starts), np.float32)
    sources, parts = sources_of(before, addend), parts_for(segments.size)

    def add_part(part: int) -> None:
        here = slice(len(starts) * part // parts, len(starts) * (part + 1) // parts)
        capacity = np.empty((2, 1 << (block - 1).bit_length()), np.float32)
        _add_squares(sources, starts[here], stops[here], capacity[0], capacity[1], norms[here])

    share_out(parts, add_part)
    return torch.from_numpy(norms)


def top_blocks(norms: Tensor, segments: Segments, block: int, work: Workspace) -> Tensor:
    if not is_flat(norms, torch.float32):
        return reference.top_blocks(norms, segments, block, work)
    rows = array(BlockTable.of(segments, block, CPU, work).rows)
    indices = np.empty(block * int(rows[:, 2].sum()), np.int64)
    bits = np.empty(norms.numel(), np.uint32)
    _choose(array(norms), rows, block, bits, indices, segments.size)
    return torch.from_numpy(indices)


@jit
def _add_squares(
    sources: Sources, starts: Array, stops: Array, row: Array, wide: Array, norms: Array
) -> None:
    """Sum the squares of each block by pairwise halving, in the same order as `reference`.

    Reads `before` and `addend` once. The squares of a block stay in the cache.
    """
    before, addend, halves = sources.before, sources.addend, sources.halves
    kind = sources.kind
    for block in range(len(starts)):
        start, stop = starts[block], stops[block]
        length = stop - start
        if kind == PLAIN:
            added = addend[start:stop]
        else:
            widen(halves[start:stop], kind, wide.view(np.uint32))
            added = wide[:length]
        if len(before):
            kept = before[start:stop]
            for n in range(length):
                total = kept[n] + added[n]
                row[n] = total * total
        else:
            for n in range(length):
                row[n] = added[n] * added[n]
        row[length:] = np.float32(0)
        half = len(row) >> 1
        while half:
            first, second = row[:half], row[half : 2 * half]
            for n in range(half):
                first[n] += second[n]
            half >>= 1
        norms[block] = row[0]


@jit
def _choose(
    norms: Array, segments: Array, block: int, bits: Array, indices: Array, size: int
) -> None:
    """Write the coordinates of each segment's largest blocks, followed by padding indices.

    Finds the smallest selected norm bit by bit, in 31 passes over the norms of a segment.
    """
    for n in range(len(norms)):
        norm = norms[n]
        bits[n] = np.float32(norm).view(np.uint32) if norm > 0 else np.uint32(0)
        if norm != norm:
            bits[n] = INFINITE
    first, at = 0, 0
    for segment in range(len(segments)):
        start, length, chosen = segments[segment]
        count = (length + block - 1) // block
        sizes = bits[first : first + count]
        floor = kth_magnitude(sizes, chosen)
        ties = chosen - reaching(sizes, np.uint32(floor + np.uint32(1)))
        for n in range(count):
            is_tie = sizes[n] == floor
            if sizes[n] > floor or (is_tie and ties > 0):
                ties -= is_tie
                low = start + n * block
                for place in range(low, min(low + block, start + length)):
                    indices[at] = place
                    at += 1
        first += count
    indices[at:] = size
