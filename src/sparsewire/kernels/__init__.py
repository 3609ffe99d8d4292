"""The inner loops: deposit, choose, withdraw, add up, pack.

`reference` says what each function means, in plain torch, on any device. `cpu` (numba) and `cuda`
(Triton) do the same faster and agree with it bit for bit. `on(device)` chooses.
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

SWITCH = "SPARSEWIRE_KERNELS"  # "reference" switches the fast ones off
PATIENCE = 2.0  # seconds until somebody is told what takes so long
_FAST = {"cpu": ("cpu", "numba", 20), "cuda": ("cuda", "triton", 10)}


@dataclass(frozen=True)
class Selection:
    """What left a residual.

    Arguments:
        indices: ascending inside each segment; `segments.size` is the padding index and fills
        unused room.
        values: those at `indices`, then those of the dense segments, in order.
        squares: for each parameter, about the sum of squares of what was deposited.
        non_finite: the first parameter that holds NaN or infinity after the deposit, or -1.
        count: how many indices there are, the filling aside.
    """

    indices: Tensor
    values: Tensor
    squares: Tensor
    non_finite: Tensor
    count: int | Tensor


class Kernels(Protocol):
    """What every module of kernels offers.

    A residual is a flat tensor with one spare slot behind its last coordinate, which stays zero.
    The three that withdraw first set after = before + addend (`before` stays as it is; None counts
    as zero), then take entries out of `after` and leave zero behind. Nothing here waits for a
    device, and no size depends on the data. In a rank's workspace kernels keep tables, buffers and
    guesses from step to step; losing them changes no result.
    """

    def top_k(
        self,
        before: Tensor | None,
        addend: Tensor,
        after: Tensor,
        segments: Segments,
        work: Workspace,
    ) -> Selection:
        """Withdraw the `count` largest magnitudes of every segment, equal ones from the left."""

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
        """Withdraw what reaches a threshold found on a strided sample of every segment.

        More hits than room: the largest of them. Fewer: the padding index behind the hits of all
        segments.
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
        """Withdraw what lies at `indices`."""

    def random_k(
        self, segments: Segments, key: int, device: torch.device, work: Workspace
    ) -> Tensor:
        """`count` coordinates of every segment, all subsets equally likely."""

    def block_random_k(
        self, segments: Segments, key: int, device: torch.device, work: Workspace
    ) -> Tensor:
        """One run of `count` coordinates of every segment: uniform start, wrapping around."""

    def block_norms(
        self,
        before: Tensor | None,
        addend: Tensor,
        segments: Segments,
        block: int,
        work: Workspace,
    ) -> Tensor:
        """The sum of squares of before + addend in every block of every segment, as float32.

        Blocks have `block` coordinates and begin where their segment does; the last may be shorter.
        """

    def top_blocks(self, norms: Tensor, segments: Segments, block: int, work: Workspace) -> Tensor:
        """The coordinates of the blocks with the largest norms, equal ones from the left: of every
        segment as many as hold its `count`. What is not a number counts as infinite.

        Every block has `block` slots; the padding index fills those of shorter ones, behind all
        others.
        """

    def add_up(
        self,
        flat: Tensor,
        messages: Sequence[tuple[Tensor, Tensor]],
        share: float,
        segments: Segments,
        work: Workspace,
    ) -> None:
        """flat = the sum of all messages' (indices, values), each times `share`, in rank order."""

    def put_back(
        self,
        residual: Tensor,
        indices: Tensor,
        errors: Tensor,
        segments: Segments,
        work: Workspace,
    ) -> None:
        """Add rounding errors to the entries of a residual that they came from."""

    def deal(self, indices: Tensor, shards: Shards, work: Workspace) -> tuple[Tensor, Tensor]:
        """Deal entries out to their owners: for every slot of every owner's part, the place of an
        entry in the owner's shard, and the number of that entry.

        An owner's slots hold its entries in order, as many of each segment as there is room for.
        The rest of them holds the owner's padding index, and the number behind that of the last
        entry.
        """

    def collect(self, places: Tensor, owner: int, shards: Shards, work: Workspace) -> Tensor:
        """The coordinates of places in an owner's shard."""

    def narrow(self, wide: Tensor, narrow: Tensor, key: int) -> None:
        """Round float32 to bfloat16 up or down at random, by the share of what would be lost."""

    def pack(self, values: Tensor, width: int) -> Tensor:
        """The low `width` bits of integers as bytes; see `bits`."""

    def unpack(self, data: Tensor, count: int, width: int) -> Tensor:
        """The `count` integers again, as int64."""

    def set_flags(self, positions: Tensor, count: int) -> Tensor:
        """`count` flags as bytes, those at `positions` set, in any order and however often each is
        there; positions beyond are left out."""

    def find_flags(self, data: Tensor, count: int) -> Tensor:
        """Ascending positions of the first `count` flags that are set.

        Where there are fewer, the rest is 8·len(data), the position behind the last flag.
        """

    def write_ascending(self, indices: Tensor, width: int, segments: Segments) -> Tensor:
        """`segments.capacity` ascending indices as Elias and Fano write them: the low `width` bits
        of each, packed, then flags; index number n sets the one at n + (index >> width)."""

    def read_ascending(self, data: Tensor, width: int, segments: Segments) -> Tensor:
        """The indices again, as int64; of corrupt bytes any numbers.

        If there are more of them than room, the last one is out of range.
        """

    def checksum(self, data: Tensor, key: int) -> Tensor:
        """64 bits that change when any bit of `data` (whole words of eight bytes) or `key` does."""

    def is_ascending(self, indices: Tensor, size: int) -> Tensor:
        """Whether indices are ascending, unique and in range, padding at the end aside."""

    def inspect(
        self,
        messages: Sequence[Tensor],
        entries: Sequence[tuple[Tensor, Tensor]],
        key: int,
        first: int,
        nbytes: int,
        size: int,
    ) -> Tensor:
        """A row of bools for every message: whether its last eight bytes are the checksum of the
        others, its indices are ascending, its values are finite, and it has `nbytes`.

        They are numbered from `first`, and `randomness.join(key, number)` is the key of a checksum.
        """


def on(device: torch.device) -> Kernels:
    """The kernels for tensors on a device: the fastest at hand."""
    if os.environ.get(SWITCH, "").lower() == "reference":
        return _module("reference")
    return _fastest(device.type)


@cache
def prepare(kind: str) -> None:
    """Compile what tensors on `kind` of device will need, so that no training step waits for it."""
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
    """One in ten, for a try."""

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
