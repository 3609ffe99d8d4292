"""The kernels for NVIDIA GPUs, in Triton.

One launch serves all segments; nothing waits for the device, so that a step can be captured in a
CUDA graph once it has run. Residuals that are not float32 are left to `reference`.
"""

from __future__ import annotations

from ..reference import collect, deal, top_blocks
from .blocks import block_norms
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
