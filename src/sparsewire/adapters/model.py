"""Find the DDP module and its parameters inside the wrappers of compilers and frameworks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import AttachError
from ..memory import Memory, MomentumCorrection
from ..notation import Part
from ..scheme import AnyScheme

_WRAPPERS = ("_orig_mod", "_forward_module", "model", "module")
# Adam, AdamW, Adagrad, Adafactor, FusedAdam, Adam8bit, RMSprop, LAMB and their relatives
_ADAPTIVE = ("ada", "rmsprop", "lamb")


def search_ddp(model: object) -> DistributedDataParallel | None:
    """Return the DDP module: the model itself, or the one inside its wrappers; else None."""
    if isinstance(model, (str, Part)):
        raise AttachError(
            f"the arguments of attach() are swapped, since the first is the scheme {model!r}. "
            f"Write attach(model, scheme)"
        )
    if isinstance(model, torch.optim.Optimizer):
        raise AttachError(
            f"attach() takes the model first, and this is {type(model).__name__}. Write "
            f"attach(model, scheme, optimizer=optimizer)"
        )
    seen: list[object] = [model]
    for candidate in seen:
        if isinstance(candidate, DistributedDataParallel):
            return candidate
        inner = (getattr(candidate, name, None) for name in _WRAPPERS)
        seen += [
            thing for thing in inner if thing is not None and all(thing is not s for s in seen)
        ]
        if len(seen) > 32:
            break
    return None


def find_ddp(model: object) -> DistributedDataParallel:
    """Return the DDP module, or raise if there is none."""
    ddp = search_ddp(model)
    if ddp is None:
        raise AttachError(
            f"an exchange of gradients needs a DistributedDataParallel model, and this "
            f"{type(model).__name__} holds none. Wrap it as DDP(model) first, or exchange updates, "
            f"which needs no DDP: attach(model, scheme, optimizer=optimizer, communicate='updates')"
        )
    return ddp


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters, by names that `torch.compile` does not change."""
    named = {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    if not named:
        raise AttachError(
            "this model has no parameter that requires a gradient. Attach to the model that trains"
        )
    for name, parameter in named.items():
        if not parameter.dtype.is_floating_point:
            raise AttachError(
                f"parameter {name} is {parameter.dtype}, and only real floating-point gradients "
                f"can be exchanged. Freeze it, or keep it out of the model"
            )
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
            raise AttachError(
                f"{name} is an embedding with sparse=True, whose gradients are sparse tensors "
                f"already. Build it with sparse=False"
            )
    return named


def gradient_views(buffer: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return a bucket's gradients in the shapes and strides of their parameters.

    `GradBucket.gradients()` returns them all as contiguous, which scrambles channels_last weights.
    """
    views, at = [], buffer.storage_offset()
    for parameter in parameters:
        size, stride = parameter.size(), parameter.stride()
        spread = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if spread != parameter.numel():  # not dense: DDP falls back to a contiguous layout
            stride = parameter.new_empty(size).stride()
        views.append(buffer.as_strided(size, stride, at))
        at += parameter.numel()
    return views


def check_optimizer(optimizer: object, parameters: Iterable[Tensor]) -> None:
    """Raise unless this is an optimizer that steps this model."""
    if optimizer is None:
        return
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list) or not hasattr(optimizer, "register_step_pre_hook"):
        raise AttachError(
            f"optimizer must be a torch optimizer such as "
            f"torch.optim.SGD(model.parameters(), lr=0.1), not "
            f"{' '.join(f'{optimizer!r:.60}'.split())}"
        )
    mine = {id(parameter) for parameter in parameters}
    if not any(id(p) in mine for group in groups for p in group["params"]):
        raise AttachError(
            "the optimizer has none of this model's parameters. Pass the one that steps this model"
        )


def check_momentum(memory: Memory, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise if both the memory and the optimizer have momentum."""
    if not isinstance(memory, MomentumCorrection):
        return
    if optimizer is None:
        raise AttachError(
            "MomentumCorrection must see the optimizer, to make sure that it has no momentum of "
            "its own. Pass attach(model, scheme, optimizer=optimizer)"
        )
    for group in optimizer.param_groups:
        own = group.get("momentum", 0) or (group.get("betas") or (0,))[0]
        if own:
            raise AttachError(
                f"{type(optimizer).__name__} has momentum {own} of its own, and MomentumCorrection "
                f"would apply it a second time. Build the optimizer without momentum, or use "
                f"memory=ErrorFeedback()"
            )


def check_nonfinite(on_nonfinite: str) -> None:
    """Raise unless `on_nonfinite` has a known value."""
    if on_nonfinite not in ("raise", "skip"):
        raise AttachError(f"on_nonfinite must be 'raise' or 'skip', not {on_nonfinite!r}")


def check_scaler(scaler: torch.amp.GradScaler | None) -> torch.amp.GradScaler | None:
    """Return the scaler, or None if it is not enabled."""
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise AttachError(f"scaler must be the GradScaler of the training loop, not {scaler!r}")
    return scaler if scaler is not None and scaler.is_enabled() else None


def is_adaptive(optimizer: object) -> bool:
    """Return whether an optimizer divides by the size of the gradients, judging by its name."""
    return any(word in type(optimizer).__name__.lower() for word in _ADAPTIVE)


def warn_of_adaptive(optimizer: torch.optim.Optimizer | None, scheme: AnyScheme) -> None:
    """Warn that an adaptive optimizer learns more slowly behind a sparse exchange of gradients."""
    name = type(optimizer).__name__
    if is_adaptive(optimizer) and not scheme.at(2**62).selector.sends_all:
        warnings.warn(
            f"{name} behind a sparse exchange of gradients can need several times as many steps as "
            f"with dense DDP, because it scales down gradients that arrive late. Exchange updates "
            f"instead: attach(…, communicate='updates') "
            f"(docs/choosing.md, 'Adam and other adaptive optimizers')",
            UserWarning,
            stacklevel=3,
        )
