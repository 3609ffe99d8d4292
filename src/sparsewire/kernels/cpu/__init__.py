"""The kernels for CPUs, compiled by numba: one pass over memory, all else while in the cache.

A withdrawal walks over the gradient tile by tile. Each tile is deposited, and while it is in the
cache, what reaches a floor is taken out: its candidates. Floors are guesses; what makes the result
exact is that candidates are put back where there are too many, and that a piece with too few is
walked over again. Threads share out the tiles; nothing depends on their number.
"""

from __future__ import annotations

import torch

from ...segments import Segments
from .coding import digest, find_flags, is_ascending, narrow, pack, set_flags, unpack
from .draws import block_random_k, random_k
from .sums import add_up, put_back
from .withdraw import chosen, over_threshold, top_k

__all__ = [
    "add_up",
    "block_random_k",
    "chosen",
    "digest",
    "find_flags",
    "is_ascending",
    "narrow",
    "over_threshold",
    "pack",
    "put_back",
    "random_k",
    "set_flags",
    "top_k",
    "unpack",
    "warm",
]


class _Half:
    """One of two."""

    def entries(self, length: int) -> int:
        return -(-length // 2)

    room = entries


def warm() -> None:
    """Compile everything, or load it from numba's cache, so that no step waits for it."""
    segments = Segments.cut({"a": (40,), "b": (2,)}, _Half(), whole=3)
    cpu, size = torch.device("cpu"), segments.size
    before, after = torch.zeros(size + 1), torch.zeros(size + 1)
    for addend in (torch.ones(size), torch.ones(size, dtype=torch.bfloat16)):
        top_k(before, addend, after, segments)
        over_threshold(before, addend, after, segments, 10, 0)
    indices = random_k(segments, 0, cpu)
    taken = chosen(None, torch.ones(size), after, segments, block_random_k(segments, 0, cpu))
    put_back(after, taken.indices, taken.values, segments)
    add_up(torch.ones(size), [(taken.indices, taken.values)], 1.0, segments)
    unpack(pack(indices, 6), indices.numel(), 6)
    find_flags(set_flags(indices, size), indices.numel())
    digest(indices.view(torch.uint8), 0)
    narrow(after, torch.empty(size + 1, dtype=torch.bfloat16), 0)
    is_ascending(indices, size)
