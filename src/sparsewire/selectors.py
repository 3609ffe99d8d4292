"""Which coordinates travel.

A selector is a frozen dataclass that withdraws entries from the ledger: a predictable one says
which `coordinates`, any other overrides `withdraw`. To add one: write the class here and name it in
`ALL`; parser, `sparsewire list`, docs and law tests follow from that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from . import kernels
from .errors import SchemeError
from .kernels import Taken
from .kernels.counter import fold
from .notation import Part, check_flag
from .segments import SEEN, Segments

DEFAULT_RATIO = 0.01  # what both papers send


@dataclass(frozen=True)
class Draw:
    """What random choices depend on."""

    seed: int
    step: int
    rank: int

    def key(self, shared: bool) -> int:
        """One integer for this step: this rank's own, or the same on all ranks."""
        return fold(self.seed, self.step, 0 if shared else self.rank + 1)


class Selector(Part, ABC):
    """Chooses coordinates.

    `shared`: all ranks choose the same ones, so that messages can be added up.
    `predictable`: any rank can compute any rank's choice, so that indices need not be sent.
    `clustered`: coordinates lie side by side.
    """

    shared: bool
    predictable: ClassVar[bool]
    clustered: ClassVar[bool] = False

    @abstractmethod
    def entries(self, length: int) -> int:
        """How many coordinates of a piece of this length are to be sent."""

    @abstractmethod
    def room(self, length: int) -> int:
        """How many slots a message has for them."""

    def withdraw(
        self,
        before: Tensor | None,
        addend: Tensor,
        after: Tensor,
        segments: Segments,
        draw: Draw,
    ) -> Taken:
        """after = before + addend; then take what travels out of `after`."""
        indices = self.coordinates(segments, draw, after.device)
        return kernels.on(after.device).chosen(before, addend, after, segments, indices)

    def coordinates(self, segments: Segments, draw: Draw, device: torch.device) -> Tensor:
        """The indices that rank `draw.rank` sends; predictable selectors only."""
        raise NotImplementedError(f"the coordinates of {self!r} depend on the gradient")

    @abstractmethod
    def contraction(self, length: int) -> float:
        """δ such that E‖x − C(x)‖² ≤ (1 − δ)‖x‖² on a piece of this length."""


@dataclass(frozen=True, repr=False)
class Sized(Selector):
    """What the selectors share that send a ratio of every piece, or a count of coordinates."""

    ratio: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.ratio is None and self.count is None:
            object.__setattr__(self, "ratio", DEFAULT_RATIO)
        if self.ratio is not None and self.count is not None:
            raise SchemeError(f"{name} takes a ratio or a count, not both: {name}(0.01)")
        if self.ratio is not None:
            if isinstance(self.ratio, bool) or not isinstance(self.ratio, (int, float)):
                raise SchemeError(f"{name}'s ratio must be a number, as in {name}(0.01)")
            if not 0 < self.ratio <= 1:
                raise SchemeError(
                    f"{name}({self.ratio}) makes no sense: the ratio is the share of coordinates "
                    f"sent, above 0 and at most 1, as in {name}(0.01); for a number of coordinates "
                    f"write {name}(count=100)"
                )
            object.__setattr__(self, "ratio", float(self.ratio))
        if self.count is not None and (
            isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1
        ):
            raise SchemeError(f"{name}'s count must be a whole number of at least 1")

    def entries(self, length: int) -> int:
        if self.count is not None:
            return min(length, self.count)
        assert self.ratio is not None
        # 0.07 * 100 is 7.000000000000001: a hair above a whole number is that number
        return min(length, max(1, math.ceil(self.ratio * length * (1 - 1e-12))))

    def resized(self, ratio: float) -> Sized:
        """The same selector with another ratio."""
        return replace(self, ratio=ratio)


@dataclass(frozen=True, repr=False)
class TopK(Sized):
    """The largest magnitudes of every piece, exactly.

    `ratio` of the coordinates (rounded up, at least one) or `count` of them; equal magnitudes are
    taken from the lowest position up. Keeps the most of the gradient that k coordinates can:
    ‖x − C(x)‖² ≤ (1 − k/n)‖x‖².

    >>> TopK(0.01).entries(250), TopK(count=10).entries(250)
    (3, 10)

    Reference: Aji & Heafield 2017; Eghlidi & Jaggi 2020.
    """

    shared: ClassVar[bool] = False  # type: ignore[misc]
    predictable = False

    def room(self, length: int) -> int:
        return self.entries(length)

    def withdraw(
        self,
        before: Tensor | None,
        addend: Tensor,
        after: Tensor,
        segments: Segments,
        draw: Draw,
    ) -> Taken:
        return kernels.on(after.device).top_k(before, addend, after, segments)

    def contraction(self, length: int) -> float:
        return self.entries(length) / length


@dataclass(frozen=True, repr=False)
class Threshold(Sized):
    """Gradient dropping: all magnitudes that reach a threshold estimated on a sample.

    The threshold is the magnitude that `ratio` of a strided sample reaches, so the number sent
    varies around the target. About `sample` coordinates are looked at in all, shared out among the
    pieces by length, and more of a piece where else fewer than 20 of its sample would reach the
    threshold. A message has room for a quarter more; if more qualify, the largest go and the rest
    stays in memory. With `scope='layer'` the threshold is local, with `scope='global'` there is one
    for all.

    >>> Threshold(0.01).entries(1000), Threshold(0.01).room(1000)
    (10, 13)

    Reference: Aji & Heafield 2017, section 3 (`GradDrop`).
    """

    sample: int = 100_000
    shared: ClassVar[bool] = False  # type: ignore[misc]
    predictable = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.sample, bool) or not isinstance(self.sample, int) or self.sample < 100:
            raise SchemeError("Threshold's sample must be a whole number of at least 100")

    def room(self, length: int) -> int:
        return min(length, math.ceil(1.25 * self.entries(length)))

    def withdraw(
        self,
        before: Tensor | None,
        addend: Tensor,
        after: Tensor,
        segments: Segments,
        draw: Draw,
    ) -> Taken:
        return kernels.on(after.device).over_threshold(
            before, addend, after, segments, self.sample, draw.key(self.shared)
        )

    def contraction(self, length: int) -> float:
        # a sample that is the whole piece finds the exact k-th magnitude; a part of it may be off
        count = self.entries(length)
        return count / length * (1.0 if count < 2 * SEEN else 0.5)


@dataclass(frozen=True, repr=False)
class _Random(Sized):
    """What the selectors share that choose without looking at the gradient."""

    predictable = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag(self, "shared")

    def room(self, length: int) -> int:
        return self.entries(length)

    def contraction(self, length: int) -> float:
        return self.entries(length) / length


@dataclass(frozen=True, repr=False)
class RandomK(_Random):
    """Coordinates chosen uniformly at random, without replacement.

    With `shared=True` (the default) all ranks choose the same ones and the values are added by an
    all-reduce; with `shared=False` every rank chooses its own. Either way the choice follows from
    seed, step, piece and rank, so no index travels. E‖x − C(x)‖² = (1 − k/n)‖x‖².

    Reference: Eghlidi & Jaggi 2020, section 3.
    """

    shared: bool = True

    def coordinates(self, segments: Segments, draw: Draw, device: torch.device) -> Tensor:
        return kernels.on(device).random_k(segments, draw.key(self.shared), device)


@dataclass(frozen=True, repr=False)
class BlockRandomK(_Random):
    """One run of coordinates from a random start, wrapping around the end of the piece.

    The start is uniform over the piece, so every coordinate is as likely as any other. Ranks choose
    their own start by default: with `shared=True` accuracy falls as ranks are added (Table 1 of
    the paper: 93.1 against 90.6 at 8 workers). No index travels. E‖x − C(x)‖² = (1 − k/n)‖x‖².

    Reference: Eghlidi & Jaggi 2020, section 3.
    """

    shared: bool = False
    clustered = True

    def coordinates(self, segments: Segments, draw: Draw, device: torch.device) -> Tensor:
        return kernels.on(device).block_random_k(segments, draw.key(self.shared), device)


@dataclass(frozen=True, repr=False)
class Dense(Selector):
    """Every coordinate: plain data parallel training, for comparison and for warm-up."""

    shared: ClassVar[bool] = True  # type: ignore[misc]
    predictable = True

    def entries(self, length: int) -> int:
        return length

    def room(self, length: int) -> int:
        return length

    def coordinates(self, segments: Segments, draw: Draw, device: torch.device) -> Tensor:
        return torch.empty(0, dtype=torch.int64, device=device)  # a dense piece travels whole

    def contraction(self, length: int) -> float:
        return 1.0


ALL: tuple[type[Selector], ...] = (TopK, Threshold, RandomK, BlockRandomK, Dense)
