"""What every selector says, and what those share that send a ratio of every segment."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..codecs import IndexCodec
from ..errors import SchemeError
from ..kernels import Selection
from ..notation import Part
from ..randomness import RandomKey
from ..requests import Routine
from ..segments import Segments
from ..state import StateField, StepState
from ..workspace import Workspace
from .negotiation import Negotiation, NegotiationPlan

NO_STATE = StepState({}, {})
DEFAULT_RATIO = 0.01  # what both papers send


class Accumulation(NamedTuple):
    """What a selector selects from: before + addend, which kernels add up as they select.

    Arguments:
        before: the residual as the last step left it; None if nothing is kept.
        addend: what this step adds to it.
        after: receives the sum, and loses what is selected.
    """

    before: Tensor | None
    addend: Tensor
    after: Tensor


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
        """Whether the coordinates follow from a `RandomKey` alone."""
        return self in (Coordination.LOCAL_SEEDED, Coordination.SHARED_SEEDED)


class Selector(Part, ABC):
    """Chooses coordinates.

    `coordination`: how ranks come to them; a property where it depends on a field.
    `proposers`: which ranks propose coordinates before a negotiated selection: all of them, or a
    leader, which changes at every step.
    `clustered`: coordinates lie side by side.
    `fields`: what the selector keeps from step to step; `select` finds it in `state`. What is kept
    only for speed, such as tables, lies in the rank's workspace `work`.
    """

    coordination: Coordination
    proposers: ClassVar[Literal["none", "leader", "all"]] = "none"
    clustered: ClassVar[bool] = False
    fields: ClassVar[tuple[StateField, ...]] = ()

    @property
    def sends_all(self) -> bool:
        """Whether every coordinate is sent, so that there is nothing to select."""
        return False

    @abstractmethod
    def entries(self, length: int) -> int:
        """Return how many coordinates of a segment of this length are to be sent."""

    @abstractmethod
    def capacity(self, length: int) -> int:
        """Return how many slots a message has for them."""

    def select(
        self,
        accumulation: Accumulation,
        segments: Segments,
        key: RandomKey,
        state: StepState,
        work: Workspace,
    ) -> Selection:
        """Add up the accumulation and take what is sent out of `after`, as a rank alone does."""
        device = accumulation.after.device
        indices = self.coordinates(segments, key, device, work)
        return kernels.on(device).chosen(*accumulation, segments, indices, work)

    def coordinates(
        self, segments: Segments, key: RandomKey, device: torch.device, work: Workspace
    ) -> Tensor:
        """Return the indices that rank `key.rank` sends; seeded selectors only."""
        raise NotImplementedError(f"the coordinates of {self!r} depend on the gradient")

    def negotiation(
        self, indices: IndexCodec, segments: Segments, world_size: int
    ) -> NegotiationPlan | None:
        """Return what `world_size` ranks tell each other before they select; None if nothing."""
        return None

    def negotiate(
        self,
        accumulation: Accumulation,
        segments: Segments,
        key: RandomKey,
        state: StepState,
        negotiation: Negotiation,
    ) -> Routine[Selection]:
        """Select among other ranks, after talking to them; negotiated selectors only."""
        raise NotImplementedError(f"{self!r} does not negotiate")

    @abstractmethod
    def contraction(self, length: int) -> float:
        """Return δ such that E‖x − C(x)‖² ≤ (1 − δ)‖x‖² on a segment of this length."""


@dataclass(frozen=True, repr=False)
class Sized(Selector):
    """What the selectors share that send a ratio of every segment, or a count of coordinates."""

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
