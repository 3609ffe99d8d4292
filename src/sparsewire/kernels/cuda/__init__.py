"""The kernels for NVIDIA GPUs, in Triton.

One launch covers all segments, and the host never waits for the device, so a step can be captured
in a CUDA graph once it has run. `reference` provides the functions that are missing here, and
handles residuals that are not float32. The functions in `X.py` launch the kernels in
`X_kernels.py`; `extract.py` launches those in `accumulate.py`, `sample.py` and `rank.py`.
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
