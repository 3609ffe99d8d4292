"""The kernels for CPUs, compiled by numba: one pass over memory, all else while in the cache.

A withdrawal walks over the gradient tile by tile. Each tile is deposited, and while it is in the
cache, what reaches a floor is taken out: its candidates. Floors are guesses; what makes the result
exact is that candidates are put back where there are too many, and that a segment with too few is
walked over again. Threads share out the tiles; nothing depends on their number.
"""

from __future__ import annotations

from .blocks import block_norms, top_blocks
from .coding import (
    checksum,
    find_flags,
    inspect,
    is_ascending,
    narrow,
    pack,
    read_ascending,
    set_flags,
    unpack,
    write_ascending,
)
from .draws import block_random_k, random_k
from .extract import chosen, over_threshold, top_k
from .shards import collect, deal
from .sums import add_up, put_back

__all__ = [
    "add_up",
    "block_norms",
    "block_random_k",
    "checksum",
    "chosen",
    "collect",
    "deal",
    "find_flags",
    "inspect",
    "is_ascending",
    "narrow",
    "over_threshold",
    "pack",
    "put_back",
    "random_k",
    "read_ascending",
    "set_flags",
    "top_blocks",
    "top_k",
    "unpack",
    "write_ascending",
]
