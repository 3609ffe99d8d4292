"""Selectors by which every rank chooses for itself: by magnitude, by chance, or everything."""

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
    """The largest magnitudes of every segment, exactly.

    `ratio` of the coordinates (rounded up, at least one) or `count` of them; equal magnitudes are
    taken from the lowest position up. Keeps the most of the gradient that k coordinates can:
    ‖x − C(x)‖² ≤ (1 − k/n)‖x‖².

    >>> TopK(0.01).entries(250), TopK(count=10).entries(250)
    (3, 10)

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
    """Gradient dropping: all magnitudes that reach a threshold estimated on a sample.

    The threshold is the magnitude that `ratio` of a strided sample reaches, so the number sent
    varies around the target. About `sample` coordinates are looked at in all, shared out among the
    segments by length, and more of a segment where else fewer than 20 of its sample would reach the
    threshold. A message has room for a quarter more; if more qualify, the largest go and the rest
    stays in memory. With `scope='layer'` the threshold is local, with `scope='global'` there is one
    for all.

    >>> Threshold(0.01).entries(1000), Threshold(0.01).capacity(1000)
    (10, 13)

    Reference: Aji & Heafield 2017, section 3 (`GradDrop`).
    """

    sample: int = 100_000
    coordination = Coordination.LOCAL

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.sample, bool) or not isinstance(self.sample, int) or self.sample < 100:
            raise SchemeError("Threshold's sample must be a whole number of at least 100")

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
    """What the selectors share that choose without looking at the gradient."""

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
    """Coordinates chosen uniformly at random, without replacement.

    With `shared=True` (the default) all ranks choose the same ones and the values are added by an
    all-reduce; with `shared=False` every rank chooses its own. Either way the choice follows from
    seed, step, segment and rank, so no index travels. E‖x − C(x)‖² = (1 − k/n)‖x‖².

    Reference: Eghlidi & Jaggi 2020, section 3.
    """

    shared: bool = True

    def coordinates(
        self, segments: Segments, key: RandomKey, device: torch.device, work: Workspace
    ) -> Tensor:
        return kernels.on(device).random_k(segments, key.key(self.shared), device, work)


@dataclass(frozen=True, repr=False)
class BlockRandomK(_Random):
    """One run of coordinates from a random start, wrapping around the end of the segment.

    The start is uniform over the segment, so every coordinate is as likely as any other. Ranks
    choose their own start by default: with `shared=True` accuracy falls as ranks are added (Table 1
    of the paper: 93.1 against 90.6 at 8 workers). No index travels. E‖x − C(x)‖² = (1 − k/n)‖x‖².

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
    """Every coordinate: plain data parallel training, for comparison and for warm-up."""

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
