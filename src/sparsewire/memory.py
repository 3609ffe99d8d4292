"""Memories: how what is not sent in one step enters the next.

A memory declares the tensors it keeps (`fields`) and says what is added to the residual at each
step. Every step reads `state.before` and writes `state.after`, which are swapped when the step is
committed: a failed step leaves no trace.
"""

from __future__ import annotations

import math
from abc import ABC
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .errors import SchemeError
from .notation import Part, check_flag
from .segments import Segments
from .state import RESIDUAL, StateField, StepState

_RESIDUAL = StateField(RESIDUAL, follows_lr=True)
_VELOCITY = StateField("velocity")


class Memory(Part, ABC):
    """Keeps what was not sent, in the field `residual` if it has one."""

    fields: ClassVar[tuple[StateField, ...]]
    dtype: str = "float32"
    decay: float = 1.0

    def kept_as(self, dtype: torch.dtype) -> torch.dtype:
        """The type that is kept from step to step, where sums are of type `dtype`."""
        return torch.bfloat16 if self.dtype == "bfloat16" and dtype == torch.float32 else dtype

    def addend(
        self, gradient: Tensor, state: StepState, segments: Segments, world_size: int
    ) -> Tensor:
        """Return what this step adds to the residual, and update the other fields in
        `state.after`."""
        return gradient

    def mask(self, state: StepState, indices: Tensor) -> None:
        """Update the fields in `state.after` where coordinates were selected."""

    def forget(self, state: StepState) -> None:
        """Let the residual in `state.after` decay, once all of the step is in it."""
        if self.decay != 1:
            state.after[RESIDUAL].mul_(self.decay)


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Memory):
    """Adds what was not sent to the next gradient: p = g + e, send C(p), e ← p − C(p).

    With `dtype='bfloat16'` e takes half the space and is rounded up or down at random, so that it
    is right on average; sums and choices are made in float32.

    With `decay` β below 1 it forgets slowly: e ← β·(p − C(p)). What decays is lost, so use it for
    updates of local steps, which become stale, and not for gradients.

    Reference: Eghlidi & Jaggi 2020, Algorithm 1, with the worker's own C(p) subtracted; the decay
    is that of SparseLoCo (Sarfi et al. 2025).
    """

    dtype: str = "float32"
    decay: float = field(default=1.0, metadata={"later": True})

    fields = (_RESIDUAL,)

    def __post_init__(self) -> None:
        _check_dtype(self)
        if not isinstance(self.decay, (int, float)) or not 0 < self.decay <= 1:
            raise SchemeError(
                f"ErrorFeedback's decay is a factor above 0 and at most 1, as in "
                f"ErrorFeedback(decay=0.95), not {self.decay!r}"
            )


@dataclass(frozen=True, repr=False)
class MomentumCorrection(Memory):
    """Momentum inside the memory: u = m·u + g, v += u, send from v.

    With `nesterov`: u = m·(u + g), v += u + g.

    With `masking` both u and v are zeroed where sent, so that stale momentum does not push on.
    `clip` bounds every tensor's gradient to that norm / √W before it is added. Tensors that travel
    whole get plain momentum. The optimizer on top must have no momentum of its own. `dtype` is that
    of u and v, as for `ErrorFeedback`.

    Reference: Lin et al. 2018, Deep Gradient Compression, section 3.
    """

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip: float | None = None
    dtype: str = "float32"

    fields = (_RESIDUAL, _VELOCITY)

    def __post_init__(self) -> None:
        if not isinstance(self.momentum, float) or not 0 < self.momentum < 1:
            raise SchemeError(
                f"MomentumCorrection({self.momentum!r}) makes no sense: momentum lies between 0 "
                f"and 1, as in MomentumCorrection(0.9); without momentum use ErrorFeedback()"
            )
        clip = self.clip
        if clip is not None and not (isinstance(clip, (int, float)) and 0 < clip < math.inf):
            raise SchemeError(
                "MomentumCorrection's clip is a norm above 0, or None for no clipping"
            )
        _check_dtype(self)
        check_flag(self, "nesterov")
        check_flag(self, "masking")

    def addend(
        self, gradient: Tensor, state: StepState, segments: Segments, world_size: int
    ) -> Tensor:
        size = gradient.numel()
        if self.clip is not None:
            gradient = self._clipped(gradient, segments, self.clip / math.sqrt(world_size))
        before = state.before[_VELOCITY.key][:size]
        velocity = state.after[_VELOCITY.key][:size]
        if self.nesterov:
            torch.add(before, gradient, out=velocity)
            velocity.mul_(self.momentum)
            return velocity + gradient
        torch.mul(before, self.momentum, out=velocity)
        return velocity.add_(gradient)

    def mask(self, state: StepState, indices: Tensor) -> None:
        if self.masking:
            state.after[_VELOCITY.key].index_fill_(0, indices, 0)

    @staticmethod
    def _clipped(gradient: Tensor, segments: Segments, bound: float) -> Tensor:
        gradient = gradient.clone()
        for _, view in segments.views(gradient):
            norm = torch.linalg.vector_norm(view, dtype=torch.float64)
            view.mul_((bound / norm).clamp(max=1.0))  # a zero norm gives inf, clamped to 1
        return gradient


@dataclass(frozen=True, repr=False)
class NoMemory(Memory):
    """Forgets what was not sent. Only for comparison: selectors that drop values need a memory."""

    fields = ()


def _check_dtype(memory: Memory) -> None:
    if memory.dtype not in ("float32", "bfloat16"):
        name = type(memory).__name__
        raise SchemeError(f"{name}'s dtype is 'float32' or 'bfloat16', not {memory.dtype!r}")


ALL: tuple[type[Memory], ...] = (ErrorFeedback, MomentumCorrection, NoMemory)
