"""Sparse exchange for DistributedDataParallel, through its public communication hook."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import kernels
from ..counters import Counters
from ..errors import AttachError, SparsewireError, StateError
from ..groups import drive
from ..groups.distributed import DistributedGroup, seconds_of
from ..groups.hierarchy import Hierarchy, IntraNode
from ..report import Report, dense_traffic, plural
from ..scheme import AnyScheme, as_scheme
from ..selectors import Selector
from ..session import Session, Topology, handshake
from .hook import activate, check_is_free, deactivate, register
from .model import (
    check_momentum,
    check_optimizer,
    find_ddp,
    named_parameters,
    warn_of_adaptive,
)
from .pipeline import Pipeline
from .scaling import Scaling


def attach(
    model: object,
    scheme: AnyScheme | Selector | str,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    follow_lr: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    on_nonfinite: Literal["raise", "skip"] = "raise",
    timeout: float | timedelta = 60.0,
    intra_node: IntraNode | None = None,
    intra_node_dtype: torch.dtype | None = None,
) -> SparseHookState:
    """Exchange the gradients of a DDP model by `scheme` from the next backward on.

    Arguments:
        model: a `DistributedDataParallel` module, as it is or wrapped by a compiler or framework.
        scheme: a `Scheme`, a selector such as `TopK(0.01)`, or either one's text.
        optimizer: the one that steps this model, on all ranks or on none. `MomentumCorrection` and
            `follow_lr` need it, and so does `on_nonfinite='skip'` where a skipped step is to move
            nothing at all, or where a rank may leave it out by itself.
        follow_lr: rescale the memory when the learning rate changes, so that what was held back is
            applied at the rate it was computed with, as in Algorithm 1 (γ inside the memory).
        scaler: the `GradScaler`, if one is used: it gets to see overflows, and the memory follows
            its scale.
        on_nonfinite: NaN or infinity on any rank makes all ranks 'raise', or 'skip' the step.
        timeout: seconds, or a `timedelta`, after which a rank that does not answer is an error.
        intra_node: the ranks that share a machine. Their gradients are averaged densely, and one
            rank of each machine exchanges the average sparsely with the others: a process group,
            one dimension of a `DeviceMesh`, the number of ranks on every machine, or 'local' to
            take that from torchrun.
        intra_node_dtype: what is added up inside a machine, such as `torch.bfloat16`.

    Returns the state of the hook: its `state_dict()` belongs into every rank's checkpoint.
    """
    state = SparseHookState(
        model,
        scheme,
        optimizer=optimizer,
        follow_lr=follow_lr,
        scaler=scaler,
        on_nonfinite=on_nonfinite,
        timeout=timeout,
        intra_node=intra_node,
        intra_node_dtype=intra_node_dtype,
    )
    try:
        register(find_ddp(model))
    except AttachError:
        state.detach()
        raise
    return state


class SparseHookState:
    """The state of `sparse_hook` for one model: what it keeps, what it counts, and the way out.

        ddp.register_comm_hook(sw.SparseHookState(ddp, "TopK(0.01)"), sw.sparse_hook)

    `attach` does both. The arguments are those of `attach`. All ranks must make one, with the same
    scheme, options and model, which they compare at once.
    """

    def __init__(
        self,
        model: object,
        scheme: AnyScheme | Selector | str,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        follow_lr: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        timeout: float | timedelta = 60.0,
        intra_node: IntraNode | None = None,
        intra_node_dtype: torch.dtype | None = None,
    ) -> None:
        ddp = find_ddp(model)
        chosen = as_scheme(scheme)
        parameters = named_parameters(ddp.module)
        check_optimizer(optimizer, parameters.values())
        check_momentum(chosen.memory, optimizer)
        if follow_lr and optimizer is None:
            raise AttachError("follow_lr needs the optimizer: attach(…, optimizer=optimizer)")
        if on_nonfinite not in ("raise", "skip"):
            raise AttachError(f"on_nonfinite is 'raise' or 'skip', not {on_nonfinite!r}")
        seconds = seconds_of(timeout)
        _check_dtype(intra_node, intra_node_dtype)
        if scaler is not None and not hasattr(scaler, "is_enabled"):
            raise AttachError(f"scaler is the GradScaler of the training loop, not {scaler!r}")
        if scaler is not None and not scaler.is_enabled():
            scaler = None  # it would let every number through
        check_is_free(ddp)
        device = next(iter(parameters.values())).device
        kernels.prepare(device.type)  # before the ranks meet, who would wait for it

        group = DistributedGroup(ddp.process_group, seconds, device)
        without = scaler is None, follow_lr, intra_node is None, intra_node_dtype, optimizer is None
        options = f"{on_nonfinite} {without}"
        drive(handshake(group.rank, chosen, parameters, options), group, Counters())
        topology, hierarchy = Topology(group.rank, group.size), None
        if intra_node is not None:
            hierarchy = Hierarchy(intra_node, intra_node_dtype, group, device)
            topology = Topology(
                hierarchy.rank,
                hierarchy.size,
                hierarchy.local_rank,
                hierarchy.local_world_size,
                intra_node_dtype,
            )
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        skips_unused = bool(ddp.find_unused_parameters or ddp.static_graph)
        session = Session(chosen, shapes, topology, skips_unused=skips_unused)
        scaling = Scaling(parameters, optimizer if follow_lr else None, scaler)
        if group.rank == 0:
            warn_of_adaptive(optimizer, chosen)

        self.model = weakref.ref(ddp)  # DDP holds the state, so that the state must not hold DDP
        self.process_group = ddp.process_group
        self._pipeline = Pipeline(session, group, hierarchy, parameters, scaling, on_nonfinite)
        # the threads stop if the model goes without a detach
        self._last_resort = weakref.finalize(ddp, self._pipeline.thread.stop)
        alarm = register_optimizer_step_pre_hook(
            _alarm_if_never_called(self._pipeline, parameters.values())
        )
        weakref.finalize(ddp, alarm.remove)  # all optimizers share it, and it outlives the model
        self._hooks: list[Any] = [alarm]
        if optimizer is not None:
            skip = _leave_out_dropped_steps(self._pipeline)
            self._hooks.append(optimizer.register_step_pre_hook(skip))
        activate(ddp, self)

    def take(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Queue one bucket; `sparse_hook` calls it."""
        return self._pipeline.take(bucket)

    @property
    def scheme(self) -> AnyScheme:
        """What was attached."""
        return self._session.scheme

    @property
    def group(self) -> DistributedGroup:
        """All ranks that take part."""
        return self._pipeline.group

    @property
    def counters(self) -> Counters:
        """What the exchange counts, to read."""
        return self._session.counters

    @property
    def steps(self) -> int:
        """Steps exchanged so far, those before a restart included."""
        return self._session.steps

    @property
    def error(self) -> SparsewireError | None:
        """The last failure in full; `backward()` raises it as a RuntimeError with its text."""
        return self._pipeline.error

    @property
    def _session(self) -> Session:
        return self._pipeline.session

    def state_dict(self) -> dict[str, Any]:
        """What this rank must save to go on later as if it had never stopped."""
        scaling = self._pipeline.scaling.state()
        local = self._session.topology.local_world_size
        return {**self._session.state_dict(), "scaling": scaling, "local_world_size": local}

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Go on from saved state, checked as a whole before anything changes.

        With `strict=False` the scheme may be another one, if its memory is of the same kind.
        """
        self._session.check(state, strict)
        local, before = self._session.topology.local_world_size, state.get("local_world_size", 1)
        if before != local:
            raise StateError(
                f"the saved state is of machines with {plural(before, 'rank')} each, and here they "
                f"have {local}: attach with the same intra_node="
            )
        self._pipeline.scaling.check(state.get("scaling"))
        self._session.load_state_dict(state, strict)
        self._pipeline.scaling.load(state["scaling"])

    def rollback(self) -> None:
        """Take back the last exchange: for a step that the optimizer did not take after all."""
        self._session.undo()

    def rescale(self, factor: float) -> None:
        """Multiply the memory, after changing the scale of the loss by hand."""
        if not 0 < factor < float("inf"):
            raise StateError(f"a memory cannot be rescaled by {factor}")
        self._session.store.follow_loss_scale(factor)

    def stats(self) -> dict[str, float]:
        """Return the counts of the last step as a flat dictionary of numbers, for any logger.

        Cheap enough to call at every step: `gradient_norm` comes from what the exchange computed,
        and `memory_norm` is estimated from a sample of the memory. `report()` has running totals.
        """
        session, last = self._session, self.counters.last_step
        dense = dense_traffic(last.values, session.topology.world_size, 4)
        return {
            "steps": session.steps,
            "skipped": session.counters.skipped,
            "bytes_sent": last.bytes_sent,
            "bytes_received": last.bytes_received,
            "dense_bytes": dense,
            "reduction": dense / last.bytes_sent if last.bytes_sent else 1.0,
            "selected": int(last.selected),
            "aimed_at": last.aimed_at,
            **{f"seconds_{stage}": seconds for stage, seconds in last.seconds.items()},
            "gradient_norm": math.sqrt(sum(session.counters.gradient_squares.values())),
            "memory_norm": session.store.estimated_norm(),
        }

    def report(self, layers: bool = False) -> Report:
        """Running totals: bytes, ratios, times and the health of the memory.

        With `layers=True` the norms are also listed by parameter.
        """
        return self._session.report(layers)

    def detach(self) -> None:
        """Go back to plain DDP. What was kept is dropped; call it on all ranks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._last_resort.detach()
        self._pipeline.thread.stop()
        if deactivate(self) and self._pipeline.thread.broken is None:
            self._pipeline.group.close()
            if self._pipeline.hierarchy is not None:
                self._pipeline.hierarchy.close()


def _check_dtype(intra_node: IntraNode | None, dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    if intra_node is None:
        raise AttachError(
            "intra_node_dtype says how a machine adds up, and no machine is given: pass intra_node"
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise AttachError(
            f"intra_node_dtype is a floating-point type, such as torch.bfloat16, not {dtype!r}"
        )


def _alarm_if_never_called(pipeline: Pipeline, parameters: Iterable[Tensor]) -> Any:
    """A hook of all optimizers that says so if one steps this model and DDP never calls: another
    module's forward is called, or a wrapper drops hooks silently."""
    mine, steps = {id(parameter) for parameter in parameters}, 0
    watched = weakref.ref(pipeline)

    def before_step(stepping: torch.optim.Optimizer, *_: object) -> None:
        nonlocal steps
        pipeline = watched()
        if pipeline is None or pipeline.called or steps == 2:
            return
        stepped = (p for group in stepping.param_groups for p in group["params"])
        if any(id(p) in mine and p.grad is not None for p in stepped):
            steps += 1
            if steps == 2:
                warnings.warn(
                    "sparsewire is attached, but DDP has not called it in the first two steps: "
                    "gradients are not exchanged, or not by sparsewire. Is another module called "
                    "than the one attached to, such as net where DDP(net) is attached, or does a "
                    "framework wrap it once more? Call the model that is attached, or attach to "
                    "the one that is called",
                    RuntimeWarning,
                    stacklevel=2,
                )

    return before_step


def _leave_out_dropped_steps(pipeline: Pipeline) -> Any:
    """An optimizer hook that lets a skipped step move nothing, not even by momentum or decay."""

    def before_step(stepping: torch.optim.Optimizer, *_: object) -> None:
        if pipeline.dropped:
            pipeline.dropped = False
            for group in stepping.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    return before_step
