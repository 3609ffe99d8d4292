"""The communication hook that DDP calls, and the registry of the states it works with.

A hook cannot be removed from DDP. Ours therefore stays after `detach`, reduces as plain DDP does,
and uses the state that is attached next. (DDP inspects the hook's signature, so this module has no
postponed annotations.)
"""

import weakref
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ..errors import AttachError


class Registered(Protocol):
    """The interface of the state that the hook is registered with."""

    @property
    def model(self) -> "weakref.ref[DistributedDataParallel]": ...

    @property
    def process_group(self) -> dist.ProcessGroup: ...


class HookState(Registered, Protocol):
    """The interface of an active state."""

    def take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]: ...


_active: "weakref.WeakKeyDictionary[DistributedDataParallel, HookState]" = (
    weakref.WeakKeyDictionary()
)


def sparse_hook(state: Registered, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange one bucket of gradients sparsely: a communication hook for DDP.

    Pass it to `register_comm_hook` together with a `SparseHookState`. `attach` does that for you.

    Arguments:
        state: A `SparseHookState` of this model.
        bucket: The bucket, from DDP.

    Returns:
        A future of the mean gradients.
    """
    if not hasattr(state, "process_group"):
        raise AttachError(
            f"sparse_hook needs a SparseHookState, not {state!r:.60}. Write "
            f"ddp.register_comm_hook(sw.SparseHookState(ddp, scheme), sw.sparse_hook)"
        )
    model = state.model()
    active = None if model is None else _active.get(model)
    if active is None:
        return allreduce_hook(state.process_group, bucket)
    return active.take(bucket)


def check_is_free(model: DistributedDataParallel) -> None:
    """Raise if the model has a state already, or another hook."""
    if model in _active:
        raise AttachError(
            "this model is attached already. Call detach() on what attach() returned first"
        )
    if any(hook is not sparse_hook for hook, _ in getattr(model, "_comm_hooks", [])):
        raise _taken()


def activate(model: DistributedDataParallel, state: HookState) -> None:
    """Make the hook of this model use a state from now on."""
    _active[model] = state


def deactivate(state: HookState) -> bool:
    """Make the hook reduce as plain DDP does again. Return whether the state was active."""
    model = state.model()
    if model is None or _active.get(model) is not state:
        return False
    del _active[model]
    return True


@dataclass
class _Anchor:
    """The hook's state in DDP, which DDP never frees. It therefore holds no tensors."""

    model: "weakref.ref[DistributedDataParallel]"
    process_group: dist.ProcessGroup


def register(model: DistributedDataParallel) -> None:
    """Register our hook, unless the model has it already."""
    try:
        model.register_comm_hook(_Anchor(weakref.ref(model), model.process_group), sparse_hook)
    except RuntimeError as error:
        if any(hook is sparse_hook for hook, _ in getattr(model, "_comm_hooks", [])):
            return
        raise _taken() from error


def _taken() -> AttachError:
    return AttachError(
        "DDP has one slot for a communication hook, and it is taken: by another "
        "register_comm_hook (fp16, PowerSGD …), by DDP(mixed_precision=…) or by an optimizer "
        "that runs in backward. Build the model's DDP without that and attach again; for "
        "16-bit values on the wire use Scheme(…, values=BFloat16())"
    )
