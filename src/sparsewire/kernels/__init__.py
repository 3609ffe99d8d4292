"""The inner loops: accumulate, select, extract, sum, pack.

`reference` defines each function in plain torch, on any device. `cpu` (numba) and `cuda` (Triton)
are faster and agree with it bit for bit. `on(device)` chooses.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from ..segments import Segments
from ..shards import Shards
from ..workspace import Workspace

log = logging.getLogger("sparsewire.kernels")

SWITCH = "SPARSEWIRE_KERNELS"  # "reference" turns the fast kernels off
PATIENCE = 2.0  # seconds of compiling before a warning is logged
_FAST = {"cpu": ("cpu", "numba", 20), "cuda": ("cuda", "triton", 10)}


@dataclass(frozen=True)
class Selection:
    """The entries that were extracted from a residual.

    Arguments:
        indices: The selected indices, ascending inside each segment. Unused slots hold the padding
            index `segments.size`.
        values: The values at `indices`, then the values of the dense segments, in order.
        squares: The approximate sum of squares of each parameter's addend.
        non_finite: The first parameter with NaN or infinity in the sum, or -1.
        count: The number of indices without padding.
    """

    indices: Tensor
    values: Tensor
    squares: Tensor
    non_finite: Tensor
    count: int | Tensor


class Kernels(Protocol):
    """The protocol of kernel modules.

    A residual is a flat tensor with one spare slot after its last coordinate, which stays zero.
    `top_k`, `over_threshold` and `chosen` set after = before + addend (None counts as zero, and
    `before` does not change), then extract entries: they return them and leave zeros in `after`.
    No function waits for a device, and no size depends on the data. Tables, buffers and guesses
    from earlier steps are kept in the rank's workspace. They affect speed only, not results.
    """

    def top_k(
        self,
        before: Tensor | None,
        addend: Tensor,
        after: Tensor,
        segments: Segments,
        work: Workspace,
    ) -> Selection:
        """Extract the `count` largest magnitudes of every segment; of equal ones, the leftmost."""

    def over_threshold(
        self,
        before: Tensor | None,
        addend: Tensor,
        after: Tensor,
        segments: Segments,
        sample: int,
        key: int,
        work: Workspace,
    ) -> Selection:
        """Extract the entries that reach a threshold from a strided sample of every segment.

        If there are more than the capacity, the largest are extracted. If there are fewer, padding
        follows the entries of all segments.
        """

    def chosen(
        self,
        before: Tensor | None,
        addend: Tensor,
        after: Tensor,
        segments: Segments,
        indices: Tensor,
        work: Workspace,
    ) -> Selection:
        """Extract the entries at `indices`."""

    def random_k(
        self, segments: Segments, key: int, device: torch.device, work: Workspace
    ) -> Tensor:
        """Draw `count` coordinates of every segment, with equal probability for all subsets."""

    def block_random_k(
        self, segments: Segments, key: int, device: torch.device, work: Workspace
    ) -> Tensor:
        """Draw one run of `count` coordinates per segment, with a uniform start and wrap-around."""

    def block_norms(
        self,
        before: Tensor | None,
        addend: Tensor,
        segments: Segments,
        block: int,
        work: Workspace,
    ) -> Tensor:
        """Return the sum of squares of before + addend in every block of every segment in float32.

        The first block begins with its segment. Blocks have `block` coordinates; the last block of
        a segment may be shorter.
        """

    def top_blocks(self, norms: Tensor, segments: Segments, block: int, work: Workspace) -> Tensor:
        """Return the coordinates of each segment's blocks with the largest norms.

        Each segment gets enough blocks for its `count`. Of equal norms, the leftmost are chosen,
        and NaN counts as infinite. Every block has `block` slots. Padding for shorter blocks comes
        after all coordinates.
        """

    def add_up(
        self,
        flat: Tensor,
        messages: Sequence[tuple[Tensor, Tensor]],
        share: float,
        segments: Segments,
        work: Workspace,
    ) -> None:
        """Write the sum of all messages' (indices, values), times `share`, in rank order."""

    def put_back(
        self,
        residual: Tensor,
        indices: Tensor,
        errors: Tensor,
        segments: Segments,
        work: Workspace,
    ) -> None:
        """Add rounding errors to the residual, at the entries that caused them."""

    def deal(self, indices: Tensor, shards: Shards, work: Workspace) -> tuple[Tensor, Tensor]:
        """Distribute entries to their owners.

        Returns, for every slot of every owner's part, an entry's position in the owner's shard and
        its number in `indices`. An owner's slots hold its entries in order, up to the capacity of
        each segment. Unused slots hold the owner's padding index and `len(indices)`.
        """

    def collect(self, places: Tensor, owner: int, shards: Shards, work: Workspace) -> Tensor:
        """Return the coordinates of positions in an owner's shard."""

    def narrow(self, wide: Tensor, narrow: Tensor, key: int) -> None:
        """Round float32 to bfloat16 stochastically, so that the expected error is zero."""

    def fit_magnitudes(
        self, values: Tensor, counts: Tensor, shares: Tensor, levels: int
    ) -> tuple[Tensor, Tensor]:
        """Return magnitudes that fit the values of each segment, and the nearest for every value.

        A few iterations of Lloyd's algorithm: assign each value to the nearest magnitude, then
        replace each magnitude by the mean of its values. The magnitudes are float32, a row for
        each level, in ascending order. A segment has `counts` values, which are neighbours; the
        first `shares` of them are no padding.
        """

    def pack(self, values: Tensor, width: int) -> Tensor:
        """Return the low `width` bits of integers as bytes; see `bits`."""

    def unpack(self, data: Tensor, count: int, width: int) -> Tensor:
        """Return the `count` packed integers as int64."""

    def set_flags(self, positions: Tensor, count: int) -> Tensor:
        """Return `count` flags as bytes, with those at `positions` set.

        Positions may repeat and come in any order. Positions of at least `count` are ignored.
        """

    def find_flags(self, data: Tensor, count: int) -> Tensor:
        """Return the ascending positions of the first `count` flags that are set.

        If there are fewer, the rest is 8·len(data), the position after the last flag.
        """

    def write_ascending(self, indices: Tensor, width: int, segments: Segments) -> Tensor:
        """Encode `segments.capacity` ascending indices by Elias-Fano.

        The low `width` bits of all indices are packed first. Then follow flags: the n-th index
        sets flag n + (index >> width).
        """

    def read_ascending(self, data: Tensor, width: int, segments: Segments) -> Tensor:
        """Decode indices as int64. Corrupt bytes give arbitrary numbers.

        If there are more indices than the capacity, the last one is out of range.
        """

    def checksum(self, data: Tensor, key: int) -> Tensor:
        """Return a 64-bit checksum of `data` (whole 8-byte words) and `key`.

        It detects any single changed bit.
        """

    def is_ascending(self, indices: Tensor, size: int) -> Tensor:
        """Return whether indices ascend, are unique and in range, except for padding at the end."""

    def inspect(
        self,
        messages: Sequence[Tensor],
        entries: Sequence[tuple[Tensor, Tensor]],
        key: int,
        first: int,
        nbytes: int,
        size: int,
    ) -> Tensor:
        """Return four bools for every message, one per check.

        The checks: its last eight bytes are the checksum of the others, its indices are ascending,
        its values are finite, and it has `nbytes` bytes. Messages are numbered from `first`, and
        `randomness.join(key, number)` is the key of a message's checksum.
        """


def on(device: torch.device) -> Kernels:
    """Return the fastest available kernels for tensors on a device."""
    if os.environ.get(SWITCH, "").lower() == "reference":
        return _module("reference")
    return _fastest(device.type)


@cache
def prepare(kind: str) -> None:
    """Compile the kernels for a kind of device, so that no training step waits for it."""
    device = torch.device(kind)
    kernels = on(device)
    start = time.perf_counter()
    words = "preparing kernels, which are compiled once for this machine …"
    patience = threading.Timer(PATIENCE, log.warning, [words])
    patience.daemon = True
    patience.start()
    try:
        _try_all(kernels, device)
    finally:
        patience.cancel()
    log.info("kernels for %s ready after %.1f s", kind, time.perf_counter() - start)


def _try_all(kernels: Kernels, device: torch.device) -> None:
    segments = Segments.partition({"a": (96, 64), "b": (64,)}, _Tenth(), dense_below=100)
    size, work = segments.size, Workspace()
    before, after = (torch.zeros(size + 1, device=device) for _ in range(2))
    for dtype in (torch.float32, torch.bfloat16):
        addend = torch.ones(size, dtype=dtype, device=device)
        for kept in (before, None):
            kernels.top_k(kept, addend, after, segments, work)
            kernels.over_threshold(kept, addend, after, segments, 10, 0, work)
    indices = kernels.random_k(segments, 0, device, work)
    kernels.chosen(before, addend.float(), after, segments, indices, work)
    run = kernels.block_random_k(segments, 0, device, work)
    selection = kernels.chosen(None, addend, after, segments, run, work)
    for kept in (before, None):
        norms = kernels.block_norms(kept, addend, segments, 8, work)
    kernels.top_blocks(norms, segments, 8, work)
    kernels.put_back(after, selection.indices, selection.values, segments, work)
    messages = [(selection.indices, selection.values)] * 2
    kernels.add_up(torch.ones_like(before[:size]), messages, 0.5, segments, work)
    count = torch.tensor([indices.numel()], device=device)
    kernels.fit_magnitudes(addend[: indices.numel()].float(), count, count, 2)
    for width in (1, 2, 6):
        kernels.unpack(kernels.pack(indices, width), indices.numel(), width)
    kernels.find_flags(kernels.set_flags(indices, size), indices.numel() + 1)
    kernels.read_ascending(kernels.write_ascending(indices, 3, segments), 3, segments)
    kernels.checksum(indices.view(torch.uint8), 0)
    kernels.is_ascending(indices, size)
    whole = torch.zeros(16, dtype=torch.uint8, device=device)
    kernels.inspect([whole] * 2, messages, 0, 0, 16, size)
    shards = Shards(segments, 2)
    places, _ = kernels.deal(indices, shards, work)
    kernels.collect(places[: shards.slots[1]], 0, shards, work)
    kernels.narrow(after, torch.empty_like(after, dtype=torch.bfloat16), 0)


class _Tenth:
    """A selector of every tenth coordinate, for a trial run."""

    def entries(self, length: int) -> int:
        return -(-length // 10)

    capacity = entries


@cache
def _fastest(kind: str) -> Kernels:
    if kind not in _FAST:
        return _module("reference")
    name, package, factor = _FAST[kind]
    try:
        return _module(name)
    except ImportError as error:
        warnings.warn(
            f"{package} is missing ({error}): sparsewire selects with plain torch on {kind}, which "
            f"takes up to {factor} times as long; pip install {package}",
            RuntimeWarning,
            stacklevel=3,
        )
        return _module("reference")


def _module(name: str) -> Kernels:
    return cast(Kernels, importlib.import_module(f".{name}", __name__))
