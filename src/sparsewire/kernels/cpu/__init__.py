"""The kernels for CPUs, compiled by numba, in one pass over memory.

The gradient is processed tile by tile. A tile is added to the residual (deposited) and, while it is
in the cache, the entries that reach a floor are taken out (withdrawn): the candidates. A floor may
be a guess. The result is exact all the same: surplus candidates are put back, and a segment with
too few of them is searched again. Threads divide the tiles among themselves; the result does not
depend on their number.
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
