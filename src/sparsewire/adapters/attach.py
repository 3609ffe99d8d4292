"""`attach`: one call that exchanges a model's gradients, or its updates, from then on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from ..errors import AttachError
from ..groups.hierarchy import IntraNode
from ..memory import MomentumCorrection
from ..scheme import AnyScheme, as_scheme
from ..selectors import Selector
from .base import Attached
from .ddp import SparseHookState
from .hook import register
from .model import find_ddp, is_adaptive, search_ddp
from .optimizer import SparseUpdates
from .options import Optimizers
from .updates import StepAhead

log = logging.getLogger("sparsewire")


@overload
def attach(
    model: object,
    scheme: AnyScheme | Selector | str,
    *,
    communicate: Literal["gradients"],
    optimizer: torch.optim.Optimizer | None = None,
    follow_lr: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    on_nonfinite: Literal["raise", "skip"] = "raise",
    timeout: float | timedelta = 60.0,
    intra_node: IntraNode | None = None,
    intra_node_dtype: torch.dtype | None = None,
    audit_every: int | None = 100,
) -> SparseHookState: ...


@overload
def attach(
    model: object,
    scheme: AnyScheme | Selector | str,
    *,
    communicate: Literal["updates"],
    optimizer: Optimizers,
    every: int = 1,
    delay: Literal[0, 1] = 0,
    step_ahead: StepAhead | None = None,
    outer: torch.optim.Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
    on_nonfinite: Literal["raise", "skip"] = "raise",
    timeout: float | timedelta = 60.0,
    intra_node: IntraNode | None = None,
    intra_node_dtype: torch.dtype | None = None,
    audit_every: int | None = 100,
) -> SparseUpdates: ...


@overload
def attach(
    model: object,
    scheme: AnyScheme | Selector | str,
    *,
    optimizer: Optimizers | None = None,
    **options: Any,
) -> Attached: ...


def attach(
    model: object,
    scheme: AnyScheme | Selector | str,
    *,
    optimizer: Optimizers | None = None,
    communicate: Literal["gradients", "updates"] | None = None,
    **options: Any,
) -> Attached:
    """Exchange what a model learns by `scheme`, from the next step on. Call it on all ranks.

    Arguments:
        model: a `DistributedDataParallel` module, as it is or wrapped by a compiler or framework.
            Updates can be exchanged for any other module as well.
        scheme: a `Scheme`, a selector such as `TopK(0.01)`, or either one's text.
        optimizer: the one that steps this model, or for updates a list of all that do. Give it on
            all ranks or on none.
        communicate: 'gradients', in backward and before the optimizer, or 'updates', which each
            rank's optimizer computes from its own gradient. Left out, it is updates for Adam and
            the other adaptive optimizers, for a model without DDP, and if an option says so.

    Options for both:
        scaler: the `GradScaler`, if one is used.
        on_nonfinite: NaN or infinity on any rank makes all ranks 'raise'. With 'skip', all ranks
            leave the step out (gradients), or the rank its own part of it (updates).
        timeout: seconds, or a `timedelta`, after which a rank that does not answer is an error.
        intra_node: the ranks that share a machine, which take part as one: a process group, one
            dimension of a `DeviceMesh`, the number of ranks on every machine, or 'local' to take
            that from torchrun.
        intra_node_dtype: what is added up inside a machine, such as `torch.bfloat16`.
        audit_every: steps between two comparisons of all ranks' weights, which raise if any rank
            has drifted away; None for no comparison.

    Options for gradients:
        follow_lr: rescale the memory when the learning rate changes, so that what was held back is
            applied at the rate it was computed with, as in Algorithm 1 (γ inside the memory).

    Options for updates:
        every: H local steps between two exchanges.
        delay: 1 lets an exchange run beside the next H steps, at whose end it is applied.
        step_ahead: λ from 0 to 1: compute gradients at x − λ·e, where the shared weights x would be
            if nothing of this rank's residual e were late. By default 'auto', which measures the
            share of the residual that the ranks have in common.
        outer: an optimizer over the same parameters that gets the mean update as its gradient, as
            DiLoCo does. Without one, the mean is subtracted.
        process_group: who takes part, if the model is not under DDP.

    Returns what counts, saves and loads: its `state_dict()` belongs into every rank's checkpoint.
    """
    if communicate not in (None, "gradients", "updates"):
        raise AttachError(f"communicate is 'gradients' or 'updates', not {communicate!r}")
    ddp = search_ddp(model)  # refuses swapped arguments
    kind = communicate or _choose(ddp is not None, as_scheme(scheme), optimizer, options)
    _check_options(kind, options)
    if kind == "updates":
        return SparseUpdates(model, scheme, optimizer=optimizer, **options)
    if optimizer is not None and isinstance(optimizer, Sequence):
        raise AttachError(
            "communicate='gradients' takes one optimizer, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1), and not a list: pass the one that steps "
            "this model, or a list of several with communicate='updates'"
        )
    state = SparseHookState(model, scheme, optimizer=optimizer, **options)
    try:
        register(find_ddp(model))
    except AttachError:
        state.detach()
        raise
    return state


_GRADIENTS = ("follow_lr",)
_UPDATES = ("every", "delay", "step_ahead", "outer", "process_group")
_BOTH = (
    "scaler",
    "on_nonfinite",
    "timeout",
    "intra_node",
    "intra_node_dtype",
    "audit_every",
)


def _choose(
    is_ddp: bool, scheme: AnyScheme, optimizer: object, options: dict[str, Any]
) -> Literal["gradients", "updates"]:
    """Return what to exchange for a user who has not said it."""
    if any(name in options for name in _UPDATES) or not is_ddp:
        return "updates"
    needs_gradients = isinstance(scheme.memory, MomentumCorrection) or options.get("follow_lr")
    if needs_gradients or scheme.at(2**62).selector.sends_all or not is_adaptive(optimizer):
        return "gradients"
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.warning(
            "%s: exchanging updates, because it would normalise away what gradients bring late "
            "(docs/choosing.md); say communicate='updates' or 'gradients' to choose",
            type(optimizer).__name__,
        )
    return "updates"


def _check_options(kind: str, options: dict[str, Any]) -> None:
    mine, others = (_UPDATES, _GRADIENTS) if kind == "updates" else (_GRADIENTS, _UPDATES)
    for name in options:
        if name in others:
            other = "gradients" if kind == "updates" else "updates"
            raise AttachError(f"{name} is an option for communicate='{other}', not for '{kind}'")
        if name not in (*mine, *_BOTH):
            raise TypeError(f"attach() got an unexpected keyword argument {name!r}")
