"""From DDP's buckets to exchanges: one backward pass is one transaction.

The hook only queues a bucket; the exchange thread (on CUDA with a stream of its own) works on it
while backward goes on. The buckets of a step complete together, after the last one, and only then
does the memory change: a step that fails anywhere has changed nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from ..desk import Call
from ..engine import Exchange, Finding, Unsound, agree
from ..errors import DamageError, DisagreementError, NonFiniteError, SparsewireError
from ..groups import drive
from ..groups.distributed import DistributedGroup
from ..groups.node import Node
from ..groups.worker import Promise, Worker
from ..ledger import Ledger
from ..meter import Meter
from ..scheme import AnyScheme, Scheme
from ..workspace import Workspace
from .model import gradient_views
from .scaling import Scaling

log = logging.getLogger("sparsewire.ddp")

GLOBAL = -1  # the unit that holds all buckets


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
    number: int = -1
    scheme: Scheme | None = None  # None until the exchange thread begins
    findings: list[Finding] = field(default_factory=list)
    error: SparsewireError | None = None


@dataclass
class _Unit:
    """Parameters that are exchanged together, and the flat tensor they are exchanged in."""

    names: tuple[str, ...]
    exchange: Exchange
    staging: Tensor | None  # None: the bucket's own buffer serves

    def copy_in(self, flat: Tensor, bucket: _Bucket) -> None:
        for view, gradient in self._pairs(flat, bucket):
            view.copy_(gradient)

    def copy_out(self, flat: Tensor, buckets: Sequence[_Bucket]) -> None:
        for bucket in buckets:
            for view, gradient in self._pairs(flat, bucket):
                gradient.copy_(view)

    def _pairs(self, flat: Tensor, bucket: _Bucket) -> list[tuple[Tensor, Tensor]]:
        places = {span.name: span for span in self.exchange.segments.spans}
        spans = [places[name] for name in bucket.names]
        return [
            (flat[span.start : span.stop].view(span.shape), gradient)
            for span, gradient in zip(spans, bucket.gradients, strict=True)
        ]


class Pipeline:
    """Takes one model's buckets and exchanges them by a scheme."""

    def __init__(
        self,
        ddp: nn.parallel.DistributedDataParallel,
        scheme: AnyScheme,
        parameters: dict[str, nn.Parameter],
        group: DistributedGroup,
        scaling: Scaling,
        on_nonfinite: Literal["raise", "skip"],
        node: Node | None = None,
    ) -> None:
        self.scheme = scheme
        self.group = group
        self.node = node
        self.peers = group if node is None else node.leaders  # None: somebody else speaks for us
        self.scaling = scaling
        self.steps = 0
        self.called = False
        self.dropped = False  # the last step was skipped, and the optimizer must not take it
        self.error: SparsewireError | None = None
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.ledger = Ledger((), self.shapes)
        if self.peers is not None:
            place = self.peers.rank, self.peers.size
            self.ledger = Ledger(scheme.fields, self.shapes, *place)
        self.meter = Meter()
        self._work = Workspace()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._dtypes = {name: p.dtype for name, p in parameters.items()}
        self._device = next(iter(parameters.values())).device
        self._on_nonfinite = on_nonfinite
        self._skips_unused = bool(ddp.find_unused_parameters or ddp.static_graph)
        self._units: dict[int, _Unit] = {}
        self._step = _Step()
        on_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_cuda else None  # type: ignore[no-untyped-call]
        self.worker = Worker(group, self._break)

    # -- on the thread that runs backward --------------------------------------------------------

    def take(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Queue one bucket; the future completes when the whole step is exchanged."""
        if bucket.index() == 0 or not self.called:
            self._step = _Step()
            self.dropped = False  # a loop may have left the skipped step out by itself
        self.called = True
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
        if self.worker.broken is not None:
            self._break(self.worker.broken)
        else:
            what = f"the exchange of step {self.steps}, bucket {item.index}"
            self.worker.submit(what, lambda: self._process(step, item))
        # through `then`, an error reaches backward() with its message
        return item.promise.future.then(lambda future: future.value())

    # -- on the exchange thread ------------------------------------------------------------------

    def _process(self, step: _Step, bucket: _Bucket) -> None:
        stream = torch.cuda.stream(self._stream) if self._stream else nullcontext()
        with stream, torch.no_grad():
            if self._stream is not None and bucket.ready is not None:
                self._stream.wait_event(bucket.ready)
            try:
                scheme = step.scheme or self._begin(step)
                if step.error is None:
                    self._exchange(step, scheme, bucket)
                if bucket.is_last and step.error is None:
                    self._finish(step)
            except (DisagreementError, DamageError, NonFiniteError) as error:
                # all ranks see these at the same place: the step fails, the group lives on
                self.ledger.discard()
                step.error = self.error = error
            if step.error is not None:
                for item in list(step.buckets):
                    item.promise.fail(step.error)

    def _begin(self, step: _Step) -> Scheme:
        step.number = self.steps
        self.meter.begin_step()
        step.scheme = self.scheme.at(step.number)
        self.ledger.discard()  # of a backward pass that was broken off
        self.scaling.follow(self.ledger)
        return step.scheme

    def _exchange(self, step: _Step, scheme: Scheme, bucket: _Bucket) -> None:
        is_global = scheme.scope == "global"
        unit = self._unit(scheme, bucket, is_global)
        flat = bucket.buffer if unit.staging is None else unit.staging
        if unit.staging is not None:
            unit.copy_in(flat, bucket)
        if is_global and not bucket.is_last:
            return
        if self.node is None:
            self._meet(step, unit, flat, bucket.index, self.group)
        else:
            with self.meter.stage("exchange"):
                self.node.average(flat)
            self.node.ask(lambda leaders: self._meet(step, unit, flat, bucket.index, leaders))
            with self.meter.stage("exchange"):
                self.node.share(flat)
        if unit.staging is not None:
            unit.copy_out(flat, step.buckets if is_global else [bucket])

    def _meet(
        self, step: _Step, unit: _Unit, flat: Tensor, bucket: int, group: DistributedGroup
    ) -> None:
        """Exchange one unit's gradient with the group."""
        exchange, scheme = unit.exchange, unit.exchange.scheme
        kept = scheme.memory.kept_as(flat.dtype)
        shard = exchange.shard(group.rank, group.size)
        key = GLOBAL if scheme.scope == "global" else bucket
        before, after = self.ledger.open(key, exchange.segments, kept, flat.device, shard)
        call = Call(step.number, group.rank, group.size, bucket, opens=not step.findings)
        run = exchange.run(flat, before, after, call, self.meter, self._work)
        step.findings.append(drive(run, group, self.meter))
        self.meter.values += exchange.segments.size

    def _verdict(self, step: _Step) -> Unsound | None:
        def ask(group: DistributedGroup) -> dict[int, str] | None:
            unsound = drive(agree(step.findings, group.rank), group, self.meter)
            return None if unsound is None else _some(unsound.parameters)

        if self.node is None:
            found = ask(self.group)
            return None if found is None else Unsound(found)
        found = self.node.ask(ask)
        return None if found is None else Unsound({int(k): v for k, v in found.items()}, "node")

    def _finish(self, step: _Step) -> None:
        unsound = self._verdict(step)
        self.meter.end_step()
        if unsound is not None:
            self.ledger.discard()
            self.meter.skipped += 1
            self._reject(step, unsound)
        else:
            self.ledger.commit()
            self.steps += 1
            self.meter.steps += 1
        for item in step.buckets:
            item.promise.keep(item.buffer)

    def _reject(self, step: _Step, unsound: Unsound) -> None:
        """NaN or infinity somewhere: no rank takes this step."""
        found = f"NaN or infinity in the gradient at step {step.number}: {unsound}"
        if self.scaling.scaler is not None:
            log.info("%s; left to the GradScaler", found)
            for item in step.buckets:
                item.buffer.fill_(float("nan"))
        elif self._on_nonfinite == "skip":
            log.warning("%s; the step is skipped on all ranks", found)
            for item in step.buckets:
                item.buffer.zero_()
            self.dropped = True
        else:
            raise NonFiniteError(
                f"{found}. No rank took the step and no memory changed. If you train with a "
                f"GradScaler, pass it: attach(…, scaler=scaler); to leave such steps out, pass "
                f"on_nonfinite='skip'"
            )

    def _unit(self, scheme: Scheme, bucket: _Bucket, is_global: bool) -> _Unit:
        """The unit that the bucket belongs to, as it was last step unless something changed."""
        key = GLOBAL if is_global else bucket.index
        names = tuple(self.shapes) if is_global else bucket.names
        unit = self._units.get(key)
        if unit is not None and unit.names == names and unit.exchange.scheme == scheme:
            return unit
        segments = scheme.cut({name: self.shapes[name] for name in names})
        dtype = torch.float32
        for name in names:
            dtype = torch.promote_types(dtype, self._dtypes[name])
        direct = (
            not is_global
            and bucket.buffer.dtype == dtype
            and all(gradient.is_contiguous() for gradient in bucket.gradients)
        )
        staging = None if direct else self._staging(unit, segments.size, dtype)
        exchange = Exchange(scheme, segments, dtype, self._skips_unused)
        unit = self._units[key] = _Unit(names, exchange, staging)
        return unit

    def _staging(self, old: _Unit | None, size: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor beside the buckets, kept where an eased ratio changes only the counts."""
        kept = None if old is None else old.staging
        if kept is not None and kept.numel() == size and kept.dtype == dtype:
            return kept
        return torch.zeros(size, dtype=dtype, device=self._device)

    def _break(self, error: SparsewireError) -> None:
        """The group is broken: nobody may wait for it any longer."""
        self.error = self._step.error = error
        self.ledger.discard()
        for item in list(self._step.buckets):
            item.promise.fail(error)


def _some(parameters: Mapping[int, str]) -> dict[int, str]:
    """The first few of them, with names that are not too long to be told to others."""
    return {rank: parameters[rank][:200] for rank in list(parameters)[:5]}
