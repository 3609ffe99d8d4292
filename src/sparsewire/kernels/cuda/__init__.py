"""The kernels for NVIDIA GPUs, in Triton.

One launch serves all pieces; nothing waits for the device, so that a step can be captured in a CUDA
graph once it has run. Ledgers that are not float32 are left to `reference`.
"""

from __future__ import annotations

from ..reference import collect, deal, top_blocks
from .blocks import block_norms
from .coding import (
    digest,
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
from .sums import add_up, put_back
from .withdraw import chosen, over_threshold, top_k

__all__ = [
    "add_up",
    "block_norms",
    "block_random_k",
    "chosen",
    "collect",
    "deal",
    "digest",
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
