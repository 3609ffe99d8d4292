"""What every selector says, and what those share that send a ratio of every piece."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from .. import kernels
from ..errors import SchemeError
from ..kernels import Taken
from ..notation import Part
from ..randomness import fold
from ..segments import Segments

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


class Table(Protocol):
    """Where ranks talk about a choice before they make it; damage on the way is remembered there.

    Its methods are generators that yield what they want communicated, as an exchange does.
    """

    world: int
    """How many ranks there are."""
    turn: int
    """This rank's place in the order of this step: 0 for the leader, who is another at the next."""

    @property
    def notice(self) -> Segments:
        """The pieces, with as many coordinates as this rank may name."""

    def add_up(self, numbers: Tensor) -> Generator[Any, Any, Tensor]:
        """The sum of all ranks' numbers, in rank order: the same bits everywhere."""

    def name(self, indices: Tensor) -> Generator[Any, Any, None]:
        """As leader: tell all others these coordinates, which fill the slots of the notice."""

    def hear(self) -> Generator[Any, Any, Tensor]:
        """The coordinates that the leader names; safe ones if they arrive damaged."""

    def pool(self, indices: Tensor) -> Generator[Any, Any, Tensor]:
        """Name these coordinates, which fill the slots of the notice, as all others name theirs.

        The answer is what anybody named, ascending, each once, then "nowhere": as many as a message
        has slots. What arrives damaged is left out.
        """


class Coordination(Enum):
    """How ranks come to the coordinates that they send."""

    LOCAL = "local"
    """Every rank selects by its own gradient, so its indices must be sent."""
    LOCAL_SEEDED = "local, seeded"
    """Every rank draws its own, and any rank can derive them: no index is sent."""
    SHARED_SEEDED = "shared, seeded"
    """All ranks draw the same, so values can be added on the way."""
    NEGOTIATED = "negotiated"
    """Ranks agree on them before they select, so values can be added on the way."""

    @property
    def is_shared(self) -> bool:
        """Whether all ranks send the same coordinates."""
        return self in (Coordination.SHARED_SEEDED, Coordination.NEGOTIATED)

    @property
    def is_seeded(self) -> bool:
        """Whether the coordinates follow from a `Draw` alone."""
        return self in (Coordination.LOCAL_SEEDED, Coordination.SHARED_SEEDED)


class Selector(Part, ABC):
    """Chooses coordinates.

    `coordination`: how ranks come to them; a property where it depends on a field.
    `proposers`: which ranks propose coordinates before the choice, written by the index codec, if
    it is negotiated: all of them, or the leader, which is another rank at every step.
    `clustered`: coordinates lie side by side.
    """

    coordination: Coordination
    proposers: ClassVar[Literal["none", "leader", "all"]] = "none"
    clustered: ClassVar[bool] = False

    @property
    def sends_all(self) -> bool:
        """Whether every coordinate is sent, so that there is nothing to select."""
        return False

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
        """after = before + addend; then take what travels out of `after`, as a rank alone does."""
        indices = self.coordinates(segments, draw, after.device)
        return kernels.on(after.device).chosen(before, addend, after, segments, indices)

    def choose(
        self,
        before: Tensor | None,
        addend: Tensor,
        after: Tensor,
        segments: Segments,
        draw: Draw,
        table: Table,
    ) -> Generator[Any, Any, Taken]:
        """The same among other ranks, who may be talked to at the `table` first."""
        yield from ()  # nothing to say
        return self.withdraw(before, addend, after, segments, draw)

    def summed(self, segments: Segments) -> int:
        """How many numbers all ranks add up before they choose."""
        return 0

    def names(self, count: int, world: int) -> int:
        """How many coordinates one of `world` ranks may name, where `count` of a piece are sent; a
        leader names all."""
        return count

    def coordinates(self, segments: Segments, draw: Draw, device: torch.device) -> Tensor:
        """The indices that rank `draw.rank` sends; seeded selectors only."""
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

    @property
    def sends_all(self) -> bool:
        return self.ratio == 1.0

    def entries(self, length: int) -> int:
        if self.count is not None:
            return min(length, self.count)
        assert self.ratio is not None
        # 0.07 * 100 is 7.000000000000001: a hair above a whole number is that number
        return min(length, max(1, math.ceil(self.ratio * length * (1 - 1e-12))))

    def resized(self, ratio: float) -> Sized:
        """The same selector with another ratio."""
        return replace(self, ratio=ratio)
