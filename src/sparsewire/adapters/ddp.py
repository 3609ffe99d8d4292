"""Sparse exchange for DistributedDataParallel, through its public communication hook.

The hook only queues a bucket; a thread (on CUDA with a stream of its own) exchanges it while
backward goes on. A step is a transaction: its buckets complete together, after the last one, and
only then does the memory change.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from ..errors import (
    AttachError,
    DisagreementError,
    NonFiniteError,
    SparsewireError,
    StateError,
)
from ..exchange import Call, Exchange, Unsound
from ..groups import drive
from ..groups.distributed import DistributedGroup
from ..groups.worker import Promise, Worker
from ..ledger import Ledger
from ..memory import LEDGER
from ..meter import Meter
from ..report import Report
from ..scheme import AnyScheme, Scheme, as_scheme
from ..selectors import Selector
from .handshake import handshake
from .model import check_momentum, find_ddp, gradient_views, named_parameters
from .scaling import Scaling
from .slot import slot_of

log = logging.getLogger("sparsewire.ddp")

STATE_FORMAT = 1


def attach(
    model: object,
    scheme: AnyScheme | Selector | str,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    follow_lr: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    on_nonfinite: Literal["raise", "skip"] = "raise",
    timeout: float = 60.0,
) -> Wire:
    """Exchange the gradients of a DDP model by `scheme` from the next backward on.

    Arguments:
        model: a `DistributedDataParallel` module, as it is or wrapped by a compiler or framework.
        scheme: a `Scheme`, a selector such as `TopK(0.01)`, or either one's text.
        optimizer: needed by `MomentumCorrection`, `follow_lr` and a skip that moves nothing at all.
        follow_lr: rescale the memory when the learning rate changes, so that what was held back is
            applied at the rate it was computed with, as in Algorithm 1 (γ inside the memory).
        scaler: the `GradScaler`, if one is used: it gets to see overflows, and the memory follows
            its scale.
        on_nonfinite: NaN or infinity on any rank makes all ranks 'raise', or 'skip' the step.
        timeout: seconds after which a rank that does not answer is an error.

    Returns the `Wire`: its `state_dict()` belongs into every rank's checkpoint.
    """
    chosen = as_scheme(scheme)
    ddp = find_ddp(model)
    parameters = named_parameters(ddp.module)
    check_momentum(chosen.memory, optimizer)
    if follow_lr and optimizer is None:
        raise AttachError("follow_lr needs the optimizer: attach(…, optimizer=optimizer)")
    if on_nonfinite not in ("raise", "skip"):
        raise AttachError(f"on_nonfinite is 'raise' or 'skip', not {on_nonfinite!r}")
    if not timeout > 0:
        raise AttachError("timeout is a number of seconds above 0")
    slot = slot_of(ddp)
    if slot.taker is not None:
        raise AttachError("this model is attached already: call detach() on its wire first")
    device = next(iter(parameters.values())).device
    group = DistributedGroup(ddp.process_group, timeout, device)
    handshake(group, chosen, parameters)
    scaling = Scaling(parameters, optimizer if follow_lr else None, scaler)
    wire = Wire(ddp, chosen, parameters, group, scaling, on_nonfinite)
    wire._watch_for_calls(ddp)
    if optimizer is not None and on_nonfinite == "skip":
        wire._guard(optimizer)
    slot.taker = wire
    return wire


@dataclass
class _Bucket:
    """One bucket as DDP handed it over."""

    index: int
    is_last: bool
    buffer: Tensor
    names: tuple[str, ...]
    gradients: list[Tensor]
    promise: Promise
    ready: torch.cuda.Event | None


@dataclass
class _Step:
    """One backward pass: its buckets so far, and what became of it."""

    buckets: list[_Bucket] = field(default_factory=list)
    started: bool = False
    number: int = -1
    scheme: Scheme | None = None
    unsound: Unsound | None = None
    error: SparsewireError | None = None


@dataclass
class _Unit:
    """Parameters that are exchanged together, and the flat tensor they are exchanged in."""

    names: tuple[str, ...]
    exchange: Exchange
    staging: Tensor | None  # None: the bucket's own buffer serves


class Wire:
    """A model's exchange: state, statistics and the way out again. Made by `attach`."""

    def __init__(
        self,
        ddp: nn.parallel.DistributedDataParallel,
        scheme: AnyScheme,
        parameters: dict[str, nn.Parameter],
        group: DistributedGroup,
        scaling: Scaling,
        on_nonfinite: Literal["raise", "skip"],
    ) -> None:
        self.scheme = scheme
        self.group = group
        self.steps = 0
        self.error: SparsewireError | None = None
        self._ddp = weakref.ref(ddp)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self._dtypes = {name: p.dtype for name, p in parameters.items()}
        self._device = group_device = next(iter(parameters.values())).device
        self._scaling = scaling
        self._on_nonfinite = on_nonfinite
        self._skips_unused = bool(ddp.find_unused_parameters or ddp.static_graph)
        self._ledger = Ledger(scheme.memory.fields, self._shapes)
        self._meter = Meter()
        self._units: dict[int, _Unit] = {}
        self._step: _Step | None = None
        self._dropped = False
        self._hooks: list[Any] = []
        on_cuda = group_device.type == "cuda"
        self._stream = torch.cuda.Stream(group_device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._worker = Worker(group, self._on_failure)
        weakref.finalize(ddp, self._worker.stop)

    # -- called by DDP, on the thread that runs backward -----------------------------------------

    def take(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Queue one bucket; the future completes when the whole step is exchanged."""
        if self._step is None or bucket.index() == 0:
            self._step = _Step()
        step = self._step
        event = None
        if self._stream is not None:
            event = torch.cuda.current_stream(self._device).record_event()
        item = _Bucket(
            bucket.index(),
            bucket.is_last(),
            bucket.buffer(),
            tuple(self._names[id(parameter)] for parameter in bucket.parameters()),
            gradient_views(bucket.buffer(), bucket.parameters()),
            Promise(self._device),
            event,
        )
        step.buckets.append(item)
        if self._worker.broken is not None:
            self._on_failure(self._worker.broken)
        else:
            what = f"the exchange of step {self.steps}, bucket {item.index},"
            self._worker.submit(what, lambda: self._process(step, item))
        # through `then`, an error reaches backward() with its message
        return item.promise.future.then(lambda future: future.value())

    # -- on the exchange thread ------------------------------------------------------------------

    def _process(self, step: _Step, bucket: _Bucket) -> None:
        stream = torch.cuda.stream(self._stream) if self._stream else nullcontext()
        with stream, torch.no_grad():
            if self._stream is not None and bucket.ready is not None:
                self._stream.wait_event(bucket.ready)
            try:
                if not step.started:
                    self._begin(step)
                if step.error is None and step.unsound is None:
                    self._exchange(step, bucket)
                if bucket.is_last:
                    self._finish(step)
            except (DisagreementError, NonFiniteError) as error:
                # all ranks see these at the same place: the step fails, the group lives on
                self._ledger.discard()
                step.error = self.error = error
            if step.error is not None:
                for item in list(step.buckets):
                    item.promise.fail(step.error)

    def _begin(self, step: _Step) -> None:
        step.started = True
        step.number = self.steps
        step.scheme = self.scheme.at(step.number)
        self._ledger.discard()  # of a backward pass that was broken off
        self._scaling.follow(self._ledger)

    def _exchange(self, step: _Step, bucket: _Bucket) -> None:
        assert step.scheme is not None
        is_global = step.scheme.scope == "global"
        unit = self._unit(step.scheme, bucket, is_global)
        segments = unit.exchange.segments
        flat = bucket.buffer if unit.staging is None else unit.staging
        if unit.staging is not None:
            _copy_in(flat, segments.spans, bucket)
        if is_global and not bucket.is_last:
            return
        key = -1 if is_global else bucket.index
        before, after = self._ledger.open(key, segments, flat.dtype, flat.device)
        call = Call(step.number, self.group.rank, self.group.size, max(key, 0))
        run = unit.exchange.run(flat, before, after, call, self._meter)
        step.unsound = drive(run, self.group, self._meter)
        if step.unsound is not None:
            bucket.buffer.fill_(float("nan"))  # for a GradScaler to see
        elif unit.staging is not None:
            for item in step.buckets if is_global else [bucket]:
                _copy_out(flat, segments.spans, item)
        self._meter.values += segments.size

    def _finish(self, step: _Step) -> None:
        if step.unsound is not None:
            self._ledger.discard()
            self._meter.skipped += 1
            self._reject(step)
        elif step.error is None:
            self._ledger.commit()
            self.steps += 1
            self._meter.steps += 1
        if step.error is None:
            for item in step.buckets:
                item.promise.keep(item.buffer)

    def _reject(self, step: _Step) -> None:
        """NaN or infinity somewhere: no rank takes this step."""
        found = f"NaN or infinity in the gradient at step {step.number}: {step.unsound}"
        if self._scaling.scaler is not None:
            log.info("%s; left to the GradScaler", found)
        elif self._on_nonfinite == "skip":
            log.warning("%s; the step is skipped on all ranks", found)
            for item in step.buckets:
                item.buffer.zero_()
            self._dropped = True
        else:
            raise NonFiniteError(
                f"{found}. No rank took the step and no memory changed. If you train with a "
                f"GradScaler, pass it: attach(…, scaler=scaler); to leave such steps out, pass "
                f"on_nonfinite='skip'"
            )

    def _unit(self, scheme: Scheme, bucket: _Bucket, is_global: bool) -> _Unit:
        key = -1 if is_global else bucket.index
        names = tuple(self._shapes) if is_global else bucket.names
        unit = self._units.get(key)
        if unit is not None and unit.names == names and unit.exchange.scheme == scheme:
            return unit
        segments = scheme.cut({name: self._shapes[name] for name in names})
        dtype = torch.float32
        for name in names:
            dtype = torch.promote_types(dtype, self._dtypes[name])
        direct = (
            not is_global
            and bucket.buffer.dtype == dtype
            and bucket.buffer.numel() == segments.size
            and all(gradient.is_contiguous() for gradient in bucket.gradients)
        )
        staging = None
        if not direct:
            same = unit is not None and unit.staging is not None
            if same and unit.staging.numel() == segments.size and unit.staging.dtype == dtype:  # type: ignore[union-attr]
                staging = unit.staging  # type: ignore[union-attr]
            else:
                staging = torch.zeros(segments.size, dtype=dtype, device=self._device)
        exchange = Exchange(scheme, segments, dtype, self._skips_unused)
        self._units[key] = _Unit(names, exchange, staging)
        return self._units[key]

    def _on_failure(self, error: SparsewireError) -> None:
        """The group is broken: nobody may wait for it any longer."""
        self.error = error
        self._ledger.discard()
        step = self._step
        if step is not None:
            step.error = error
            for item in list(step.buckets):
                item.promise.fail(error)

    # -- for the user ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this rank must save to go on later as if it had never stopped."""
        return {
            "format": STATE_FORMAT,
            "scheme": repr(self.scheme),
            "rank": self.group.rank,
            "world": self.group.size,
            "step": self.steps,
            "scaling": self._scaling.state(),
            "memory": self._ledger.state(),
        }

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Go on from saved state, checked as a whole before anything changes.

        With `strict=False` the scheme may be another one, if its memory is of the same kind.
        """
        if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
            raise StateError(
                f"this is no state of a sparsewire exchange in format {STATE_FORMAT}; pass what "
                f"wire.state_dict() returned"
            )
        if strict and state["scheme"] != repr(self.scheme):
            raise StateError(
                f"the saved state is of {state['scheme']}, and this model runs {self.scheme!r}; "
                f"attach with the saved scheme, or pass strict=False to keep the memory"
            )
        if (state["rank"], state["world"]) != (self.group.rank, self.group.size):
            raise StateError(
                f"the saved state is of rank {state['rank']} of {state['world']}, and this is rank "
                f"{self.group.rank} of {self.group.size}: every rank saves and loads its own, and "
                f"the number of ranks must stay the same"
            )
        self._ledger.load(state["memory"])
        self._scaling.load(state["scaling"])
        self.steps = state["step"]

    def rollback(self) -> None:
        """Take back the last exchange: for a step that the optimizer did not take after all."""
        if self._ledger.undo():
            self.steps -= 1

    def rescale(self, factor: float) -> None:
        """Multiply the memory, after changing the scale of the loss by hand."""
        if not 0 < factor < float("inf"):
            raise StateError(f"a memory cannot be rescaled by {factor}")
        self._ledger.scale(dict.fromkeys(self._shapes, factor), self._ledger.fields)

    def stats(self) -> dict[str, float]:
        """Running totals as a flat dictionary of numbers, for any logger."""
        return self.report().stats()

    def report(self, layers: bool = False) -> Report:
        """Bytes, ratios, times and the health of the memory; `layers=True`: per parameter too."""
        squares = {}
        if LEDGER in self._ledger.fields:
            for name in self._shapes:
                kept = self._ledger.recall(name)
                squares[name] = float(kept[LEDGER].double().square().sum()) if kept else 0.0
        return Report.of(repr(self.scheme), self._meter, self.group.size, squares, layers)

    def detach(self) -> None:
        """Go back to plain DDP. The memory is dropped with the wire; call it on all ranks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._worker.stop()
        ddp = self._ddp()
        if ddp is not None and slot_of(ddp).taker is self:
            slot_of(ddp).taker = None
            if self._worker.broken is None:
                self.group.close()

    # -- looking after the training loop ---------------------------------------------------------

    def _watch_for_calls(self, ddp: nn.Module) -> None:
        """Say so if the hook is never called: some wrappers drop hooks silently."""
        forwards = 0
        reference = weakref.ref(self)

        def before_forward(module: nn.Module, _: object) -> None:
            nonlocal forwards
            wire = reference()
            syncs = getattr(module, "require_backward_grad_sync", True)
            if wire is None or not (module.training and torch.is_grad_enabled() and syncs):
                return
            forwards += 1
            if forwards == 3 and wire._step is None:
                warnings.warn(
                    "sparsewire is attached, but DDP has not called it in the first two steps: "
                    "gradients are not exchanged sparsely. Is another model trained than the one "
                    "attached to, or does a framework wrap it once more? Attach to the module "
                    "whose forward is called",
                    RuntimeWarning,
                    stacklevel=2,
                )

        self._hooks.append(ddp.register_forward_pre_hook(before_forward))

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Let a skipped step move nothing at all, not even by momentum or weight decay."""

        def before_step(stepping: torch.optim.Optimizer, *_: object) -> None:
            if self._dropped:
                self._dropped = False
                for group in stepping.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None

        self._hooks.append(optimizer.register_step_pre_hook(before_step))


def _copy_in(flat: Tensor, spans: Iterable[Any], bucket: _Bucket) -> None:
    places = {span.name: span for span in spans}
    for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
        span = places[name]
        flat[span.start : span.stop].view(span.shape).copy_(gradient)


def _copy_out(flat: Tensor, spans: Iterable[Any], bucket: _Bucket) -> None:
    places = {span.name: span for span in spans}
    for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
        span = places[name]
        gradient.copy_(flat[span.start : span.stop].view(span.shape))
