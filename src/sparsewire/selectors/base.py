"""The base classes of selectors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
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
    """The input of a selector: the sum before + addend, which kernels compute as they select.

    Arguments:
        before: The residual after the last step; None if there is none.
        addend: The gradient, or what else this step adds to the residual.
        after: Receives the sum, with zeros where coordinates are selected.
    """

    before: Tensor | None
    addend: Tensor
    after: Tensor


class Coordination(Enum):
    """How ranks choose the coordinates that they send."""

    LOCAL = "local"
    """Every rank selects by its own gradient, so it must send its indices."""
    LOCAL_SEEDED = "local, seeded"
    """Every rank draws its own coordinates. The others can derive them, so no index is sent."""
    SHARED_SEEDED = "shared, seeded"
    """All ranks draw the same coordinates, so values can be summed in transit."""
    NEGOTIATED = "negotiated"
    """Ranks agree on the coordinates before they select, so values can be summed in transit."""

    @property
    def is_shared(self) -> bool:
        """Whether all ranks send the same coordinates."""
        return self in (Coordination.SHARED_SEEDED, Coordination.NEGOTIATED)

    @property
    def is_seeded(self) -> bool:
        """Whether the coordinates follow from a `RandomKey` alone."""
        return self in (Coordination.LOCAL_SEEDED, Coordination.SHARED_SEEDED)


class Selector(Part, ABC):
    """Base class of selectors.

    Attributes:
        coordination: How ranks choose the coordinates; a property if it depends on a field.
        proposers: Which ranks propose coordinates before a negotiated selection: `'all'`, a
            `'leader'` that changes at every step, or `'none'`.
        clustered: True if the selected coordinates are neighbours.
        fields: The state that the selector keeps from step to step; `select` finds it in `state`.
            Tables that are kept only for speed belong in the rank's workspace `work`.
    """

    coordination: Coordination
    proposers: ClassVar[Literal["none", "leader", "all"]] = "none"
    clustered: ClassVar[bool] = False
    fields: ClassVar[tuple[StateField, ...]] = ()

    @property
    def sends_all(self) -> bool:
        """Whether every coordinate is sent."""
        return False

    @abstractmethod
    def entries(self, length: int) -> int:
        """Return how many coordinates to send of a segment of this length."""

    @abstractmethod
    def capacity(self, length: int) -> int:
        """Return how many slots a message has for a segment of this length."""

    def select(
        self,
        accumulation: Accumulation,
        segments: Segments,
        key: RandomKey,
        state: StepState,
        work: Workspace,
    ) -> Selection:
        """Write the accumulation into `after`, take the selected entries out of it and return them.

        This is the selection of a rank alone, without a negotiation.

        Arguments:
            accumulation: What to select from.
            segments: The segments to select from.
            key: The source of random choices.
            state: The selector's own state before and after the step.
            work: This rank's workspace.
        """
        device = accumulation.after.device
        indices = self.coordinates(segments, key, device, work)
        return kernels.on(device).chosen(*accumulation, segments, indices, work)

    def coordinates(
        self, segments: Segments, key: RandomKey, device: torch.device, work: Workspace
    ) -> Tensor:
        """Return the indices that rank `key.rank` sends. Only seeded selectors have them."""
        raise NotImplementedError(f"the coordinates of {self!r} depend on the gradient")

    def negotiation(
        self, indices: IndexCodec, segments: Segments, world_size: int
    ) -> NegotiationPlan | None:
        """Return the sizes of the negotiation before a selection; None if there is none."""
        return None

    def negotiate(
        self,
        accumulation: Accumulation,
        segments: Segments,
        key: RandomKey,
        state: StepState,
        negotiation: Negotiation,
    ) -> Routine[Selection]:
        """Negotiate with the other ranks, then select. Only negotiated selectors have it."""
        raise NotImplementedError(f"{self!r} does not negotiate")

    @abstractmethod
    def contraction(self, length: int) -> float:
        """Return δ such that E‖x − C(x)‖² ≤ (1 − δ)‖x‖² on a segment of this length."""


@dataclass(frozen=True, repr=False)
class Sized(Selector):
    """Base class of selectors that send a ratio or a number of the coordinates of each segment.

    Arguments:
        ratio: The share of the coordinates, above 0 and at most 1: `ceil(ratio × length)` of each
            segment, and at least one. If neither is given, 0.01.
        count: The number of coordinates of each segment, instead of a ratio.
        min_count: With a ratio, send at least this many coordinates of each segment, so that small
            tensors are sent more densely than large ones.
    """

    ratio: float | None = None
    count: int | None = None
    min_count: int = field(default=1, kw_only=True, metadata={"later": True})

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.ratio is None and self.count is None:
            object.__setattr__(self, "ratio", DEFAULT_RATIO)
        if self.ratio is not None and self.count is not None:
            raise SchemeError(f"{name} takes a ratio or a count, not both. Write {name}(0.01)")
        if self.ratio is not None:
            if isinstance(self.ratio, bool) or not isinstance(self.ratio, (int, float)):
                raise SchemeError(f"{name}'s ratio must be a number, as in {name}(0.01)")
            if not 0 < self.ratio <= 1:
                raise SchemeError(
                    f"{name}'s ratio is the share of coordinates to send, above 0 and at most 1, "
                    f"not {self.ratio}. Write {name}(0.01) for 1 %, or {name}(count=100) for a "
                    f"number of coordinates"
                )
            object.__setattr__(self, "ratio", float(self.ratio))
        if self.count is not None and (
            isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1
        ):
            raise SchemeError(f"{name}'s count must be a whole number of at least 1")
        if isinstance(self.min_count, bool) or not isinstance(self.min_count, int):
            raise SchemeError(f"{name}'s min_count must be a whole number, not {self.min_count!r}")
        if self.min_count < 1 or (self.count is not None and self.min_count > 1):
            raise SchemeError(
                f"{name}'s min_count must be at least 1, and goes with a ratio, as in "
                f"{name}(0.01, min_count=32)"
            )

    @property
    def sends_all(self) -> bool:
        return self.ratio == 1.0

    def entries(self, length: int) -> int:
        if self.count is not None:
            return min(length, self.count)
        assert self.ratio is not None
        # 0.07 * 100 is 7.000000000000001: a hair above a whole number is that number
        return min(length, max(self.min_count, math.ceil(self.ratio * length * (1 - 1e-12))))

    def resized(self, ratio: float) -> Sized:
        """Return the same selector with another ratio."""
        return replace(self, ratio=ratio)
