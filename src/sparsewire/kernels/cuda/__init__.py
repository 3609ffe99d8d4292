"""The kernels for NVIDIA GPUs, in Triton.

One launch serves all segments; nothing waits for the device, so that a step can be captured in a
CUDA graph once it has run. What is missing here is looked up in `reference`, and residuals that are
not float32 are left to it. The launches of `X.py` run the kernels of `X_kernels.py`; those of
`extract.py` run `accumulate.py`, `sample.py` and `rank.py`.
"""

from __future__ import annotations

from typing import Any

from .. import reference
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
    "top_k",
    "unpack",
    "write_ascending",
]


def __getattr__(name: str) -> Any:
    if name in reference.__all__:
        return getattr(reference, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
