"""CPU kernels, compiled by numba, that make one pass over memory.

The gradient is processed tile by tile. Each tile is added to the residual (deposited) and, while
it is in the cache, entries whose magnitude reaches a floor are removed (withdrawn) as candidates. A
floor may be a guess; the result is exact regardless, because surplus candidates are put back and a
segment with too few candidates is searched again. Tiles are divided among threads, and the result
does not depend on the number of threads.
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
from .magnitudes import fit_magnitudes
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
    "fit_magnitudes",
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
