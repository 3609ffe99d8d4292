"""Compilation, thread-level parallelism, and helpers shared by all loops."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
Function = TypeVar("Function", bound=Callable[..., Any])

CPU = torch.device("cpu")
SHARED_OUT = 1 << 16  # the fewest coordinates per thread

GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MUL1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL2 = np.uint64(0x94D049BB133111EB)


def _forget_other_versions() -> None:
    """Delete the compilation cache of other versions of these files.

    numba checks the source file of a compiled loop, but not those of the functions it calls.
    """
    here = Path(__file__).parent
    stamp = here / "__pycache__" / "sources"
    now = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(here.glob("*.py"))))
    with contextlib.suppress(OSError):  # a read-only folder holds no cache
        if stamp.exists() and stamp.read_text() == now.hexdigest():
            return
        for path in (here / "__pycache__").glob("*.nb[ic]"):
            path.unlink()
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(now.hexdigest())


_forget_other_versions()


def jit(function: Function) -> Function:
    """Compile a loop on its first call, and cache the result on disk if possible."""
    try:
        return cast(Function, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # there is no writable folder
        return cast(Function, numba.njit(nogil=True)(function))


@jit
def mix(word: Any) -> Any:
    """Return one SplitMix64 step. Compiled version of `randomness.mix`."""
    word = word + GAMMA
    word = (word ^ (word >> np.uint64(30))) * _MUL1
    word = (word ^ (word >> np.uint64(27))) * _MUL2
    return word ^ (word >> np.uint64(31))


@cache
def _pool(_process: int, threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="sparsewire")


def parts_for(size: int) -> int:
    """Return the number of parts to divide work on `size` coordinates into."""
    return max(1, min(torch.get_num_threads(), size // SHARED_OUT))


def share_out(parts: int, work: Callable[[int], None]) -> None:
    """Run `work` for every part in parallel, the first on the calling thread."""
    if parts == 1:
        work(0)
        return
    others = [_pool(os.getpid(), parts - 1).submit(work, part) for part in range(1, parts)]
    work(0)
    for other in others:
        other.result()


def is_flat(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    """Return whether compiled loops can read a tensor's memory."""
    is_plain = tensor.dim() == 1 and tensor.is_contiguous() and tensor.device == CPU
    return is_plain and tensor.dtype in dtypes


def array(tensor: Tensor) -> Array:
    return tensor.detach().numpy()
