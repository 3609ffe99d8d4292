"""The exchange of DDP's buckets: one backward pass is one transaction.

The hook only queues a bucket. The exchange thread (on CUDA with its own stream) processes it while
backward continues. The buckets of a step complete together, after the last one, and only then does
the residual change. A step that fails changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from ..errors import CorruptMessageError, DisagreementError, NonFiniteError, SparsewireError
from ..exchange import NonFinite
from ..groups import drive
from ..groups.connection import Connection
from ..groups.thread import ExchangeThread, Promise
from ..requests import Routine
from ..session import Session, Transaction, Unit
from .audit import Audit
from .base import Meeting
from .model import gradient_views
from .scaling import Scaling

log = logging.getLogger("sparsewire.ddp")

Result = TypeVar("Result")
GLOBAL = -1  # the unit that holds all buckets


@dataclass
class _Bucket:
    """One bucket from DDP."""

    index: int
    is_last: bool
    buffer: Tensor
    names: tuple[str, ...]
    gradients: list[Tensor]
    promise: Promise
    ready: torch.cuda.Event | None


@dataclass
class _Step:
    """One backward pass: its buckets so far, its transaction and its error."""

    buckets: list[_Bucket] = field(default_factory=list)
    transaction: Transaction | None = None  # None until the exchange thread begins
    error: SparsewireError | None = None


class Pipeline:
    """Exchanges one model's buckets by a scheme."""

    def __init__(
        self,
        session: Session,
        meeting: Meeting,
        parameters: dict[str, nn.Parameter],
        scaling: Scaling,
        on_nonfinite: Literal["raise", "skip"],
        audit: Audit,
    ) -> None:
        self.session = session
        assert isinstance(meeting.group, Connection)
        self.meeting = meeting
        self.group = meeting.group
        self.scaling = scaling
        self.audit = audit
        self.called = False
        self.dropped = False  # the last step was skipped, and the optimizer must not take it
        self.error: SparsewireError | None = None
        self._parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._dtypes = {name: p.dtype for name, p in parameters.items()}
        self._device = next(iter(parameters.values())).device
        self._on_nonfinite = on_nonfinite
        self._step = _Step()
        on_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_cuda else None  # type: ignore[no-untyped-call]
        self.thread = ExchangeThread(self.group, self._break)

    # -- on the thread that runs backward --------------------------------------------------------

    def take(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Queue one bucket; the future completes when the whole step is exchanged."""
        if bucket.index() == 0 or not self.called:
            self._step = _Step()
            self.dropped = False  # the training loop may have left out the skipped step
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
        if self.thread.broken is not None:
            self._break(self.thread.broken)
        else:
            what = f"the exchange of step {self.session.steps}, bucket {item.index}"
            self.thread.submit(what, lambda: self._process(step, item))
        # through `then`, an error reaches backward() with its message
        return item.promise.future.then(lambda future: future.value())

    # -- on the exchange thread ------------------------------------------------------------------

    def _process(self, step: _Step, bucket: _Bucket) -> None:
        stream = torch.cuda.stream(self._stream) if self._stream else nullcontext()
        with stream, torch.no_grad():
            if self._stream is not None and bucket.ready is not None:
                self._stream.wait_event(bucket.ready)
            try:
                transaction = step.transaction or self._begin(step)
                if step.error is None:
                    self._exchange(step, transaction, bucket)
                if bucket.is_last and step.error is None:
                    self._finish(step, transaction)
            except (DisagreementError, CorruptMessageError, NonFiniteError) as error:
                # all ranks raise these at the same point: the step fails, the group stays usable
                self.session.store.discard()
                step.error = self.error = error
            if step.error is not None:
                for item in list(step.buckets):
                    item.promise.fail(step.error)

    def _begin(self, step: _Step) -> Transaction:
        step.transaction = self.session.begin()
        self.scaling.follow(self.session.store)
        return step.transaction

    def _exchange(self, step: _Step, transaction: Transaction, bucket: _Bucket) -> None:
        is_global = transaction.scheme.scope == "global"
        unit = self._unit(transaction, bucket, is_global)
        is_staged = unit.flat is not bucket.buffer
        if is_staged:
            for view, gradient in _pairs(unit, [bucket]):
                view.copy_(gradient)
        if is_global and not bucket.is_last:
            return
        self._drive(transaction.exchange(unit, bucket.index))
        if is_staged:
            for view, gradient in _pairs(unit, step.buckets if is_global else [bucket]):
                gradient.copy_(view)

    def _unit(self, transaction: Transaction, bucket: _Bucket, is_global: bool) -> Unit:
        """Return the unit that the bucket belongs to.

        It uses the bucket's own buffer, unless the exchange needs more parameters, another type or
        another order of the values.
        """
        key = GLOBAL if is_global else bucket.index
        names = tuple(self._dtypes) if is_global else bucket.names
        dtype = torch.float32
        for name in names:
            dtype = torch.promote_types(dtype, self._dtypes[name])
        direct = (
            not is_global
            and bucket.buffer.dtype == dtype
            and all(gradient.is_contiguous() for gradient in bucket.gradients)
        )
        shapes = {name: self.session.shapes[name] for name in names}
        flat = bucket.buffer if direct else None
        return transaction.unit(key, shapes, dtype, self._device, flat)

    def _drive(self, routine: Routine[Result]) -> Result:
        return drive(routine, self.meeting.driver, self.session.counters)

    def _finish(self, step: _Step, transaction: Transaction) -> None:
        non_finite = self._drive(transaction.agree())
        if non_finite is None:
            if self.audit.is_due(transaction.number):
                audit = self.audit.compare(self._parameters, transaction.number, self.group.rank)
                self._drive(audit)
            transaction.commit()
        else:
            transaction.rollback()
            self.session.counters.skipped += 1
            self._reject(step, transaction.number, non_finite)
        for item in step.buckets:
            item.promise.keep(item.buffer)

    def _reject(self, step: _Step, number: int, non_finite: NonFinite) -> None:
        """Handle a step with NaN or infinity, which no rank takes."""
        found = f"NaN or infinity in the gradient at step {number}: {non_finite}"
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
                f"{found}. No rank took the step, and no residual changed. If you train with a "
                f"GradScaler, pass it: attach(…, scaler=scaler); to leave such steps out, pass "
                f"on_nonfinite='skip'"
            )

    def _break(self, error: SparsewireError) -> None:
        """Fail all futures of the step, because the group is broken."""
        self.error = self._step.error = error
        self.session.store.discard()
        for item in list(self._step.buckets):
            item.promise.fail(error)


def _pairs(unit: Unit, buckets: Sequence[_Bucket]) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a view of the unit and the gradient that belongs there."""
    views = dict(unit.views())
    return [
        (views[name], gradient)
        for bucket in buckets
        for name, gradient in zip(bucket.names, bucket.gradients, strict=True)
    ]
