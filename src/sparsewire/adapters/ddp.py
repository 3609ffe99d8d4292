"""Sparse exchange for DistributedDataParallel, through its public communication hook."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import kernels
from ..errors import AttachError, SparsewireError, StateError
from ..groups.distributed import DistributedGroup
from ..groups.node import Node, Within
from ..meter import Meter
from ..report import Report, dense_traffic, plural
from ..scheme import AnyScheme, as_scheme
from ..selectors import Selector
from . import saved
from .handshake import handshake
from .model import (
    check_momentum,
    check_optimizer,
    find_ddp,
    named_parameters,
    warn_of_adaptive,
)
from .pipeline import Pipeline
from .scaling import Scaling
from .slot import Slot, slot_of


def attach(
    model: object,
    scheme: AnyScheme | Selector | str,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    follow_lr: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    on_nonfinite: Literal["raise", "skip"] = "raise",
    timeout: float = 60.0,
    within: Within | None = None,
    within_dtype: torch.dtype | None = None,
) -> Wire:
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
        timeout: seconds after which a rank that does not answer is an error.
        within: the ranks that share a machine. Their gradients are averaged densely, and one rank
            of each machine exchanges the average sparsely with the others: a process group, one
            dimension of a `DeviceMesh`, the number of ranks on every machine, or 'local' to take
            that from torchrun.
        within_dtype: what is added up inside a machine, such as `torch.bfloat16`.

    Returns the `Wire`: its `state_dict()` belongs into every rank's checkpoint.
    """
    ddp = find_ddp(model)
    chosen = as_scheme(scheme)
    parameters = named_parameters(ddp.module)
    check_optimizer(optimizer, parameters.values())
    check_momentum(chosen.memory, optimizer)
    if follow_lr and optimizer is None:
        raise AttachError("follow_lr needs the optimizer: attach(…, optimizer=optimizer)")
    if on_nonfinite not in ("raise", "skip"):
        raise AttachError(f"on_nonfinite is 'raise' or 'skip', not {on_nonfinite!r}")
    if not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
        raise AttachError(f"timeout is a number of seconds above 0, not {timeout!r}")
    if within is None and within_dtype is not None:
        raise AttachError("within_dtype says how a node adds up, and no node is given: pass within")
    if within_dtype is not None and not (
        isinstance(within_dtype, torch.dtype) and within_dtype.is_floating_point
    ):
        raise AttachError(
            f"within_dtype is a floating-point type, such as torch.bfloat16, not {within_dtype!r}"
        )
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise AttachError(f"scaler is the GradScaler of the training loop, not {scaler!r}")
    if scaler is not None and not scaler.is_enabled():
        scaler = None  # it would let every number through
    slot = slot_of(ddp)
    if slot.taker is not None:
        raise AttachError("this model is attached already: call detach() on its wire first")
    device = next(iter(parameters.values())).device
    kernels.prepare(device.type)  # before the ranks meet, who would wait for it
    group = DistributedGroup(ddp.process_group, timeout, device)
    without = (scaler is None, follow_lr, within is None, within_dtype, optimizer is None)
    options = f"{on_nonfinite} {without}"
    handshake(group, chosen, parameters, options)
    node = None if within is None else Node(within, within_dtype, group, device)
    scaling = Scaling(parameters, optimizer if follow_lr else None, scaler)
    if group.rank == 0:
        warn_of_adaptive(optimizer, chosen)
    pipeline = Pipeline(ddp, chosen, parameters, group, scaling, on_nonfinite, node)
    slot.taker = pipeline
    wire = Wire(pipeline, slot, weakref.finalize(ddp, pipeline.worker.stop))
    alarm = register_optimizer_step_pre_hook(_alarm_if_never_called(pipeline, parameters.values()))
    wire._hooks.append(alarm)
    weakref.finalize(ddp, alarm.remove)  # all optimizers share it, and it outlives the model
    if optimizer is not None:
        wire._hooks.append(optimizer.register_step_pre_hook(_leave_out_dropped_steps(pipeline)))
    return wire


class Wire:
    """A model's exchange: its state, its statistics and the way out again. Made by `attach`."""

    def __init__(self, pipeline: Pipeline, slot: Slot, last_resort: weakref.finalize) -> None:  # type: ignore[type-arg]
        self._pipeline = pipeline
        self._slot = slot
        self._last_resort = last_resort  # stops the threads if the model goes without a detach
        self._hooks: list[Any] = []

    @property
    def scheme(self) -> AnyScheme:
        """What was attached."""
        return self._pipeline.scheme

    @property
    def group(self) -> DistributedGroup:
        """All ranks that take part."""
        return self._pipeline.group

    @property
    def meter(self) -> Meter:
        """What the exchange counts, to read."""
        return self._pipeline.meter

    @property
    def steps(self) -> int:
        """Steps exchanged so far, those before a restart included."""
        return self._pipeline.steps

    @property
    def error(self) -> SparsewireError | None:
        """The last failure in full; `backward()` raises it as a RuntimeError with its text."""
        return self._pipeline.error

    def state_dict(self) -> dict[str, Any]:
        """What this rank must save to go on later as if it had never stopped."""
        p = self._pipeline
        state = saved.save(p.scheme, p.group, p.steps, p.ledger)
        within = 1 if p.node is None else p.node.size
        return {**state, "scaling": p.scaling.state(), "within": within}

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Go on from saved state, checked as a whole before anything changes.

        With `strict=False` the scheme may be another one, if its memory is of the same kind.
        """
        p = self._pipeline
        within = 1 if p.node is None else p.node.size
        before = state.get("within", 1) if isinstance(state, Mapping) else within
        if before != within:
            raise StateError(
                f"the saved state is of machines with {plural(before, 'rank')} each, and here they "
                f"have {within}: attach with the same within="
            )
        saved.check(state, p.scheme, p.group, p.ledger, strict)
        p.scaling.check(state.get("scaling"))
        p.ledger.load(state["memory"])
        p.scaling.load(state["scaling"])
        p.steps = state["step"]

    def rollback(self) -> None:
        """Take back the last exchange: for a step that the optimizer did not take after all."""
        if self._pipeline.ledger.undo():
            self._pipeline.steps -= 1
            self._pipeline.meter.steps -= 1

    def rescale(self, factor: float) -> None:
        """Multiply the memory, after changing the scale of the loss by hand."""
        if not 0 < factor < float("inf"):
            raise StateError(f"a memory cannot be rescaled by {factor}")
        ledger = self._pipeline.ledger
        ledger.scale(dict.fromkeys(ledger.shapes, factor), ledger.fields)

    def stats(self) -> dict[str, float]:
        """Return the counts of the last step as a flat dictionary of numbers, for any logger.

        Cheap enough to call at every step: `gradient_norm` comes from what the exchange computed,
        and `memory_norm` is estimated from a sample of the memory. `report()` has running totals.
        """
        p, last = self._pipeline, self._pipeline.meter.last_step
        dense = dense_traffic(last.values, self._world, 4)
        return {
            "steps": p.steps,
            "skipped": p.meter.skipped,
            "bytes_sent": last.bytes_sent,
            "bytes_received": last.bytes_received,
            "dense_bytes": dense,
            "reduction": dense / last.bytes_sent if last.bytes_sent else 1.0,
            "selected": int(last.selected),
            "aimed_at": last.aimed_at,
            **{f"seconds_{stage}": seconds for stage, seconds in last.seconds.items()},
            "gradient_norm": math.sqrt(sum(p.meter.gradient_squares.values())),
            "memory_norm": p.ledger.estimated_norm(),
        }

    def report(self, layers: bool = False) -> Report:
        """Running totals: bytes, ratios, times and the health of the memory.

        With `layers=True` the norms are also listed by parameter.
        """
        p = self._pipeline
        return Report.of(repr(p.scheme), p.meter, self._world, p.ledger.squares(), layers)

    @property
    def _world(self) -> int:
        """How many ranks exchange sparsely."""
        p = self._pipeline
        return p.group.size if p.node is None else p.node.count

    def detach(self) -> None:
        """Go back to plain DDP. The memory is dropped with the wire; call it on all ranks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._last_resort.detach()
        self._pipeline.worker.stop()
        if self._slot.taker is self._pipeline:
            self._slot.taker = None
            if self._pipeline.worker.broken is None:
                self._pipeline.group.close()
                if self._pipeline.node is not None:
                    self._pipeline.node.close()


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
