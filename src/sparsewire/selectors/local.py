"""Selectors that need no negotiation: by magnitude, at random, or everything."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..errors import SchemeError
from ..kernels import Selection
from ..notation import check_flag
from ..randomness import RandomKey
from ..segments import SEEN, Segments
from ..state import StepState
from ..workspace import Workspace
from .base import Accumulation, Coordination, Selector, Sized


@dataclass(frozen=True, repr=False)
class TopK(Sized):
    """Select the k largest magnitudes of each segment, exactly.

    Of equal magnitudes, those at lower positions come first. No other k coordinates keep more of
    the gradient's norm: ‖x − C(x)‖² ≤ (1 − k/n)‖x‖².

    Arguments:
        ratio: The share of the coordinates to send, above 0 and at most 1. 0.01 by default.
        count: The number of coordinates to send of each segment, instead of a ratio.
        min_count: With a ratio, send at least this many coordinates of each segment, so that small
            tensors are sent more densely than large ones.

    >>> import torch
    >>> import sparsewire as sw
    >>> scheme = sw.Scheme(sw.TopK(count=2), dense_below=0, dense_1d=False)
    >>> state = sw.functional.init(scheme, {"w": torch.zeros(5)})
    >>> gradient = {"w": torch.tensor([1.0, -4.0, 0.5, 3.0, 2.0])}
    >>> mean, state = sw.functional.exchange(gradient, state, sw.groups.Alone())
    >>> mean["w"].tolist(), state.memory["w"]["residual"].tolist()
    ([0.0, -4.0, 0.0, 3.0, 0.0], [1.0, 0.0, 0.5, 0.0, 2.0])

    Reference: Aji & Heafield 2017; Eghlidi & Jaggi 2020.
    """

    coordination = Coordination.LOCAL

    def capacity(self, length: int) -> int:
        return self.entries(length)

    def select(
        self,
        accumulation: Accumulation,
        segments: Segments,
        key: RandomKey,
        state: StepState,
        work: Workspace,
    ) -> Selection:
        return kernels.on(accumulation.after.device).top_k(*accumulation, segments, work)

    def contraction(self, length: int) -> float:
        return self.entries(length) / length


@dataclass(frozen=True, repr=False)
class Threshold(Sized):
    """Select all magnitudes that reach a threshold, which is estimated on a sample.

    This is gradient dropping. The threshold is the magnitude that a share `ratio` of a strided
    sample reaches, so the number of coordinates varies around the target; `report()` shows it. A
    message has room for a quarter more than the target. If more coordinates qualify, the largest
    are sent and the others stay in the residual. There is one threshold for each segment.

    Arguments:
        ratio: The share of the coordinates to aim at. 0.01 by default.
        count: The number of coordinates of each segment to aim at, instead of a ratio.
        sample: The size of the sample over all segments, at least 100. It is divided among the
            segments by length. A segment gets more if fewer than 20 coordinates of its sample would
            reach the threshold.
        min_count: With a ratio, send at least this many coordinates of each segment, so that small
            tensors are sent more densely than large ones.

    >>> import sparsewire as sw
    >>> selector = sw.Threshold(0.01, sample=10_000)
    >>> selector.entries(1_000_000), selector.capacity(1_000_000)
    (10000, 12500)

    Reference: Aji & Heafield 2017, section 3 (`GradDrop`).
    """

    sample: int = 100_000
    coordination = Coordination.LOCAL

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.sample, bool) or not isinstance(self.sample, int) or self.sample < 100:
            raise SchemeError(
                f"Threshold's sample must be a whole number of at least 100, not {self.sample!r}"
            )

    def capacity(self, length: int) -> int:
        return min(length, math.ceil(1.25 * self.entries(length)))

    def select(
        self,
        accumulation: Accumulation,
        segments: Segments,
        key: RandomKey,
        state: StepState,
        work: Workspace,
    ) -> Selection:
        return kernels.on(accumulation.after.device).over_threshold(
            *accumulation, segments, self.sample, key.key(shared=False), work
        )

    def contraction(self, length: int) -> float:
        # a sample that is the whole segment finds the exact k-th magnitude; a part of it may be off
        count = self.entries(length)
        return count / length * (1.0 if count < 2 * SEEN else 0.5)


@dataclass(frozen=True, repr=False)
class _Random(Sized):
    """Base class of selectors that do not look at the gradient."""

    shared: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag(self, "shared")

    @property
    def coordination(self) -> Coordination:  # type: ignore[override]
        return Coordination.SHARED_SEEDED if self.shared else Coordination.LOCAL_SEEDED

    def capacity(self, length: int) -> int:
        return self.entries(length)

    def contraction(self, length: int) -> float:
        return self.entries(length) / length


@dataclass(frozen=True, repr=False)
class RandomK(_Random):
    """Select coordinates uniformly at random, without replacement.

    The choice follows from seed, step and segment, and from the rank unless it is shared. Every
    rank can derive it, so no index is sent. E‖x − C(x)‖² = (1 − k/n)‖x‖².

    Arguments:
        ratio: The share of the coordinates to send. 0.01 by default.
        count: The number of coordinates to send of each segment, instead of a ratio.
        shared: If True, all ranks select the same coordinates, and `AllReduce` sums the values. If
            False, every rank selects its own.
        min_count: With a ratio, send at least this many coordinates of each segment, so that small
            tensors are sent more densely than large ones.

    >>> import sparsewire as sw
    >>> sw.Scheme(sw.RandomK(0.01)).collective
    AllReduce()
    >>> sw.Scheme(sw.RandomK(0.01, shared=False)).collective
    AllGather()

    Reference: Eghlidi & Jaggi 2020, section 3.
    """

    shared: bool = True

    def coordinates(
        self, segments: Segments, key: RandomKey, device: torch.device, work: Workspace
    ) -> Tensor:
        return kernels.on(device).random_k(segments, key.key(self.shared), device, work)


@dataclass(frozen=True, repr=False)
class BlockRandomK(_Random):
    """Select one run of neighbouring coordinates per segment, from a random start.

    It is the cheapest selection. The run wraps around the end of the segment, and every coordinate
    is equally likely. No index is sent. E‖x − C(x)‖² = (1 − k/n)‖x‖².

    Arguments:
        ratio: The share of the coordinates to send. 0.01 by default.
        count: The number of coordinates to send of each segment, instead of a ratio.
        shared: If False, the default, every rank has a start of its own. If True, all ranks select
            the same run; accuracy then falls as ranks are added (90.6 % instead of 93.1 % with 8
            workers, Table 1 of the paper).
        min_count: With a ratio, send at least this many coordinates of each segment, so that small
            tensors are sent more densely than large ones.

    >>> import torch
    >>> import sparsewire as sw
    >>> scheme = sw.Scheme(sw.BlockRandomK(count=3), dense_below=0, dense_1d=False)
    >>> state = sw.functional.init(scheme, {"w": torch.zeros(8)})
    >>> mean, state = sw.functional.exchange({"w": torch.ones(8)}, state, sw.groups.Alone())
    >>> int(mean["w"].sum())
    3

    Reference: Eghlidi & Jaggi 2020, section 3.
    """

    shared: bool = False
    clustered = True

    def coordinates(
        self, segments: Segments, key: RandomKey, device: torch.device, work: Workspace
    ) -> Tensor:
        return kernels.on(device).block_random_k(segments, key.key(self.shared), device, work)


@dataclass(frozen=True, repr=False)
class Dense(Selector):
    """Select every coordinate: plain data-parallel training, for comparison and for warm-up.

    >>> import sparsewire as sw
    >>> sw.Scheme(sw.Dense()).collective
    AllReduce()
    """

    coordination = Coordination.SHARED_SEEDED

    @property
    def sends_all(self) -> bool:
        return True

    def entries(self, length: int) -> int:
        return length

    def capacity(self, length: int) -> int:
        return length

    def coordinates(
        self, segments: Segments, key: RandomKey, device: torch.device, work: Workspace
    ) -> Tensor:
        return torch.empty(0, dtype=torch.int64, device=device)  # a dense segment is sent densely

    def contraction(self, length: int) -> float:
        return 1.0
