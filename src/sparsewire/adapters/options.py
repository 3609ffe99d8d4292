"""Checks of the options of an exchange of updates, before the ranks communicate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import AttachError
from ..memory import MomentumCorrection
from ..scheme import AnyScheme
from .model import check_optimizer
from .updates import StepAhead

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def check_optimizers(
    optimizer: Optimizers | None, parameters: Mapping[str, nn.Parameter]
) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        raise AttachError(
            "exchanging updates, which a model without DDP does, needs the optimizer. Pass "
            "attach(…, optimizer=optimizer), with a list if several step the model; to exchange "
            "gradients, attach to DDP(model)"
        )
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in optimizers:
        check_optimizer(each, parameters.values())
    if not optimizers:
        raise AttachError("optimizer is an empty list. Pass the optimizers that step the model")
    return optimizers


def check_memory(scheme: AnyScheme) -> None:
    if isinstance(scheme.memory, MomentumCorrection):
        raise AttachError(
            "MomentumCorrection is for communicate='gradients': updates contain the optimizer's "
            "own momentum already. Use memory=ErrorFeedback()"
        )


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not fits or (most is not None and isinstance(value, int) and value > most):
        bound = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise AttachError(f"{name} must be a whole number {bound}, not {value!r}")


def check_ahead(
    step_ahead: StepAhead | None, scheme: AnyScheme, is_hierarchical: bool
) -> StepAhead:
    """Return λ. By default it is measured, or 0 without a residual."""
    has_residual = bool(scheme.memory.fields) and not is_hierarchical
    if step_ahead is None:
        return "auto" if has_residual else 0.0
    is_number = isinstance(step_ahead, (int, float)) and not isinstance(step_ahead, bool)
    if step_ahead != "auto" and not (is_number and 0 <= float(step_ahead) <= 1):
        raise AttachError(f"step_ahead must be from 0 to 1, or 'auto', not {step_ahead!r}")
    if step_ahead != 0 and is_hierarchical:
        raise AttachError(
            "step_ahead needs every rank's own residual, and with intra_node= one rank of each "
            "machine keeps it for all. Leave step_ahead out"
        )
    if step_ahead != 0 and not has_residual:
        raise AttachError("step_ahead needs a residual, and NoMemory() keeps none. Leave it out")
    return step_ahead
