"""Memories: what happens to values that are not sent.

A memory declares the tensors that it keeps (`fields`) and computes what each step adds to the
residual. A step reads `state.before` and writes `state.after`, which are swapped when the step is
committed. A failed step therefore changes nothing.
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
    """Base class of memories. Values that are not sent stay in the field `residual`, if it exists.

    Attributes:
        fields: The state that is kept for each parameter, as `StateField` objects.
        dtype: The type of that state: `'float32'` or `'bfloat16'`.
        decay: The factor by which the residual is multiplied at every exchange.
    """

    fields: ClassVar[tuple[StateField, ...]]
    dtype: str = "float32"
    decay: float = 1.0

    def kept_as(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type of the state for a gradient whose sums are of type `dtype`."""
        return torch.bfloat16 if self.dtype == "bfloat16" and dtype == torch.float32 else dtype

    def addend(
        self, gradient: Tensor, state: StepState, segments: Segments, world_size: int
    ) -> Tensor:
        """Return what this step adds to the residual, and update the other fields in `state.after`.

        Arguments:
            gradient: The gradient or update of the step.
            state: The fields before and after the step.
            segments: The segments of the gradient.
            world_size: The number of ranks that exchange.
        """
        return gradient

    def mask(self, state: StepState, indices: Tensor) -> None:
        """Update the fields in `state.after` at the selected coordinates."""

    def forget(self, state: StepState) -> None:
        """Multiply the residual in `state.after` by the decay, after everything else."""
        if self.decay != 1:
            state.after[RESIDUAL].mul_(self.decay)


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Memory):
    """Add what was not sent to the next gradient: p = g + e, send C(p), e ← p − C(p). The default.

    The residual e takes 4 bytes per parameter, and as much again so that a failed step can be
    undone; 2 and 2 with `'bfloat16'`. Gradients in bfloat16 and float16 are summed in float32, and
    float64 ones in float64.

    Arguments:
        dtype: The type of e. With `'bfloat16'` it is rounded up or down at random, so that it is
            right on average. Sums and selections still use float32, in space for one bucket.
        decay: β, above 0 and at most 1: e ← β·(p − C(p)). What decays is lost. Use it for updates
            of local steps, which become stale, and not for gradients.

    >>> import sparsewire as sw
    >>> sw.Scheme(sw.TopK(0.01)).memory
    ErrorFeedback()
    >>> small = sw.Scheme(sw.TopK(0.01), memory=sw.ErrorFeedback(dtype="bfloat16"))
    >>> sw.explain(small, {"w": (1000, 1000)}, workers=2).memory_bytes
    4000000

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
                f"ErrorFeedback's decay must be above 0 and at most 1, as in "
                f"ErrorFeedback(decay=0.95), not {self.decay!r}"
            )


@dataclass(frozen=True, repr=False)
class MomentumCorrection(Memory):
    """Apply momentum before the exchange: u ← m·u + g, v ← v + u, send from v.

    A coordinate then collects momentum while it waits. Tensors that are sent densely get plain
    momentum. The optimizer must have no momentum of its own; `attach` needs the optimizer to check
    that. Only for exchanges of gradients.

    Arguments:
        momentum: m, between 0 and 1.
        nesterov: If True, u ← m·(u + g), v ← v + u + g.
        masking: If True, set u as well as v to zero at the coordinates that are sent, so that stale
            momentum has no further effect.
        clip: Clip each tensor's gradient to this norm divided by √W before it is added, where W is
            the number of ranks. None does not clip.
        dtype: The type of u and v, as for `ErrorFeedback`.

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
                f"MomentumCorrection's momentum must be between 0 and 1, as in "
                f"MomentumCorrection(0.9), not {self.momentum!r}. Without momentum use "
                f"ErrorFeedback()"
            )
        clip = self.clip
        if clip is not None and not (isinstance(clip, (int, float)) and 0 < clip < math.inf):
            raise SchemeError(
                f"MomentumCorrection's clip must be a norm above 0, or None for no clipping, not "
                f"{clip!r}"
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
    """Drop what was not sent. Only for comparison: training suffers if values are lost.

    >>> import torch
    >>> import sparsewire as sw
    >>> scheme = sw.Scheme(sw.TopK(0.01), memory=sw.NoMemory())
    >>> sw.functional.init(scheme, {"w": torch.zeros(100, 100)}).memory
    {'w': {}}
    """

    fields = ()


def _check_dtype(memory: Memory) -> None:
    if memory.dtype not in ("float32", "bfloat16"):
        name = type(memory).__name__
        raise SchemeError(f"{name}'s dtype must be 'float32' or 'bfloat16', not {memory.dtype!r}")


ALL: tuple[type[Memory], ...] = (ErrorFeedback, MomentumCorrection, NoMemory)
"""All memories."""
