"""`attach`: start exchanging a model's gradients or updates with one call."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from inspect import signature
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
    """Exchange a model's gradients or updates sparsely, from the next step on.

    Call it on all ranks, with the same scheme, options and model. The ranks compare these before
    the call returns. If the call fails, the model is as it was before.

    Without `communicate`, updates are exchanged

    - for a model without DDP;
    - if an option for updates is given;
    - for Adam, AdamW, Adagrad, Adafactor, RMSprop, LAMB and other adaptive optimizers, which are
      recognised by name, unless the scheme sends everything or has `MomentumCorrection`, or
      `follow_lr` is set. Rank 0 logs a warning that says so.

    In all other cases gradients are exchanged, and so they are if no `optimizer` is given for a
    DDP model.

    Arguments:
        model: A `DistributedDataParallel` module, also if it is wrapped by `torch.compile`, Fabric
            or a Lightning strategy. To exchange updates, any other module works as well.
        scheme: What to send: a `Scheme`, a `Warmup`, a selector such as `TopK(0.01)`, or the text
            of any of them.
        optimizer: The optimizer that steps this model; to exchange updates, a list if there are
            several. Updates always need it. Gradients need it for `MomentumCorrection`, for
            `follow_lr`, and to make a skipped step change nothing at all. Pass it on all ranks or
            on none.
        communicate: `'gradients'` exchanges them during backward, before the optimizer.
            `'updates'` lets each rank's optimizer step on the rank's own gradient and exchanges
            the resulting changes of the weights. If None, see above.

    Options for both:
        scaler: The `GradScaler` of the training loop, if there is one. It sees overflows on any
            rank, and the residual follows its scale.
        on_nonfinite: What to do if a gradient or an update has NaN or infinity on any rank:
            `'raise'` on all ranks, or `'skip'`. Skipping leaves out the step on all ranks
            (gradients), or this rank's part of it (updates).
        timeout: Seconds, or a `timedelta`, after which a rank that does not answer is an error.
            60 by default.
        intra_node: The ranks that share a machine. They average densely, and one rank of each
            machine exchanges the average sparsely with the other machines. Pass a process group,
            one dimension of a `DeviceMesh`, the number of ranks on every machine, or `'local'` to
            use torchrun's number.
        intra_node_dtype: The type of the sums inside a machine, such as `torch.bfloat16`. If None,
            the type of the values.
        audit_every: The number of steps between two comparisons of the weights of all ranks, 100
            by default. All ranks raise if they differ. None turns the comparison off.

    Options for gradients:
        follow_lr: If True, rescale the residual when the learning rate changes, so that an old
            gradient is applied at the rate at which it was computed. This is Algorithm 1 of
            Eghlidi & Jaggi 2020, where the learning rate is inside the memory.

    Options for updates:
        every: H, the number of local steps between two exchanges. 1 by default.
        delay: With 1 the exchange runs during the next H steps, and its result is applied at their
            end. With 0, the default, `optimizer.step()` waits for it.
        step_ahead: λ from 0 to 1. A rank computes its gradients at x − λ·e, where x are the shared
            weights and e is its residual. By default it is `'auto'`, which measures the share of
            the residual that the ranks have in common; it is 0 without a residual and with
            `intra_node`.
        outer: An optimizer over the same parameters that gets the mean update as its gradient, as
            in DiLoCo. Without one, the mean update is subtracted from the shared weights.
        process_group: The ranks that take part, if the model is not under DDP. If None, the
            default group, or this process alone if there is none.

    Returns:
        A `SparseHookState` if gradients are exchanged, a `SparseUpdates` if updates are. Keep it,
        because its `state_dict()` belongs in every rank's checkpoint.

    Raises:
        AttachError: The model, the optimizer or an option cannot work, or an option belongs to the
            other kind of exchange.
        DisagreementError: The ranks disagree on the scheme, an option or the model.

    In a single process, without a process group:

    >>> import torch
    >>> import sparsewire as sw
    >>> net = torch.nn.Linear(64, 64)
    >>> optimizer = torch.optim.AdamW(net.parameters())
    >>> wire = sw.attach(net, sw.TopK(0.01), optimizer=optimizer)
    >>> net(torch.ones(64)).sum().backward()
    >>> optimizer.step()
    >>> wire.steps
    1
    >>> wire.detach()
    """
    if communicate not in (None, "gradients", "updates"):
        raise AttachError(f"communicate must be 'gradients' or 'updates', not {communicate!r}")
    ddp = search_ddp(model)  # refuses swapped arguments
    kind = communicate or _choose(ddp is not None, as_scheme(scheme), optimizer, options)
    _check_options(kind, options)
    if kind == "updates":
        return SparseUpdates(model, scheme, optimizer=optimizer, **options)
    if optimizer is not None and isinstance(optimizer, Sequence):
        raise AttachError(
            "communicate='gradients' takes one optimizer, not a list. Pass the optimizer that "
            "steps this model, such as torch.optim.SGD(model.parameters(), lr=0.1), or exchange "
            "updates, which take a list"
        )
    state = SparseHookState(model, scheme, optimizer=optimizer, **options)
    try:
        register(find_ddp(model))
    except AttachError:
        state.detach()
        raise
    return state


def _options(kind: type[Attached]) -> frozenset[str]:
    """Return the names of a class's options, without the arguments that `attach` has itself."""
    return frozenset(signature(kind).parameters) - {"model", "scheme", "optimizer"}


_OPTIONS = {"gradients": _options(SparseHookState), "updates": _options(SparseUpdates)}


def _choose(
    is_ddp: bool, scheme: AnyScheme, optimizer: object, options: dict[str, Any]
) -> Literal["gradients", "updates"]:
    """Return what to exchange if the user did not choose."""
    if options.keys() & (_OPTIONS["updates"] - _OPTIONS["gradients"]) or not is_ddp:
        return "updates"
    needs_gradients = isinstance(scheme.memory, MomentumCorrection) or options.get("follow_lr")
    if needs_gradients or scheme.at(2**62).selector.sends_all or not is_adaptive(optimizer):
        return "gradients"
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.warning(
            "%s: exchanging updates, because this optimizer would scale down gradients that "
            "arrive late (docs/choosing.md). Tune the learning rate again, starting at twice the "
            "rate of dense training. Pass communicate='updates' or 'gradients' to choose",
            type(optimizer).__name__,
        )
    return "updates"


def _check_options(kind: str, options: dict[str, Any]) -> None:
    other = "gradients" if kind == "updates" else "updates"
    for name in options:
        if name in _OPTIONS[kind]:
            continue
        if name in _OPTIONS[other]:
            raise AttachError(
                f"{name} is an option for communicate='{other}', and this model exchanges {kind}. "
                f"Leave it out, or pass communicate='{other}'"
            )
        raise TypeError(f"attach() got an unexpected keyword argument {name!r}")
