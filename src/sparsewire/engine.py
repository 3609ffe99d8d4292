"""The five steps, for one scheme and one cut gradient: deposit, withdraw, write, exchange, apply.

`Exchange.run` is a generator that yields what it wants communicated and is sent the answer. It
knows nothing of networks, threads or devices; the drivers in `groups/` carry its requests.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .collectives import Gather, Request
from .desk import Call, Desk
from .kernels import Taken
from .kernels.counter import fold, name_key
from .memory import LEDGER
from .message import (
    DIGEST_BYTES,
    HEADER_BYTES,
    VERDICT_BYTES,
    Context,
    Header,
    compare,
    fingerprint,
    layout_fingerprint,
    pack_verdict,
    settle,
)
from .meter import Meter
from .scheme import Scheme
from .segments import Segments, Span
from .selectors import Draw


@dataclass(frozen=True)
class Unsound:
    """NaN or infinity, by rank and first parameter."""

    parameters: Mapping[int, str]

    def __str__(self) -> str:
        return "; ".join(f"rank {rank} in {name}" for rank, name in self.parameters.items())


@dataclass(frozen=True)
class Finding:
    """What one rank found in one exchange; on a GPU not known until somebody looks."""

    segments: Segments
    context: Context
    damage: Tensor
    unsound: Tensor


Run = Generator[Request, Any, Finding]


def agree(findings: Sequence[Finding], rank: int) -> Generator[Request, Any, Unsound | None]:
    """Compare with all ranks what was found in the exchanges of a step.

    Returns None if every gradient now holds the mean. Raises `DamageError`, on all ranks, if any
    message was bad.
    """
    own = [pack_verdict(f.damage, f.unsound, f.context.key(rank)) for f in findings]
    answers = yield Gather(torch.cat(own))
    said = torch.stack(list(answers)).cpu().view(len(answers), len(findings), VERDICT_BYTES)
    for number, finding in enumerate(findings):
        bad = settle(said[:, number].contiguous(), finding.context)
        if bad:
            names = {sender: finding.segments.spans[span].name for sender, span in bad.items()}
            return Unsound(names)
    return None


@dataclass(frozen=True)
class Exchange:
    """Runs a scheme over gradients cut into `segments`.

    `skips_unused`: a parameter whose gradient is zero on all ranks is left out, memory included,
    because DDP will not hand its mean to the optimizer (`find_unused_parameters`).
    """

    scheme: Scheme
    segments: Segments
    dtype: torch.dtype = torch.float32
    skips_unused: bool = False

    @cached_property
    def index_bytes(self) -> int:
        """Bytes for indices in one message."""
        return self.scheme.indices.nbytes(self.segments)

    @cached_property
    def value_count(self) -> int:
        """Values in one message: the selected ones, then those that travel whole."""
        return self.segments.room + self.segments.whole_size

    @cached_property
    def value_bytes(self) -> int:
        """Bytes for values in one message."""
        return self.scheme.values.nbytes(self.segments)

    @cached_property
    def message_bytes(self) -> int:
        """Bytes of one message, without the header that goes ahead."""
        return self.index_bytes + self.value_bytes + self.padding_bytes + DIGEST_BYTES

    @cached_property
    def padding_bytes(self) -> int:
        """Bytes behind the values, so that a message is made of whole words."""
        return -(self.index_bytes + self.value_bytes) % 8

    @cached_property
    def _fingerprints(self) -> tuple[int, int]:
        unused = "skips unused" if self.skips_unused else ""
        return (
            fingerprint(repr(self.scheme), unused),
            layout_fingerprint(self.segments, self.dtype),
        )

    def traffic(self, world: int) -> int:
        """Bytes each rank sends in the first exchange of a step, as many as it receives."""
        ahead = HEADER_BYTES + (len(self.segments.spans) if self.skips_unused else 0)
        payload = self.scheme.collective.traffic(
            self.message_bytes,
            self.value_count,
            self.scheme.values.dtype.itemsize,
            self.dtype.itemsize,
            world,
        )
        return (world - 1) * (ahead + VERDICT_BYTES) + payload

    def run(
        self,
        gradient: Tensor,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        call: Call,
        meter: Meter,
    ) -> Run:
        """Exchange one flat gradient, which ends up holding the mean over all ranks.

        Reads the memory `before` and writes `after`; it is for the caller to keep `after`, or not,
        once the ranks `agree`.
        """
        kept, after = after, self._widened(after)
        before = self._widened(before)
        with meter.stage("select"):
            taken = self._withdraw(gradient, before, after, call)
            meter.deposited[self.segments.spans] = taken.squares
            self._count(taken, meter)
        waits = gradient.device.type != "cpu"  # to look at a number there

        if not self._has_met or (call.opens and not waits):
            header = self._header(call)
            answers = yield Gather(header.pack())
            headers = [Header.unpack(data, rank) for rank, data in enumerate(answers)]
            compare(headers, header, repr(self.scheme))
            self.__dict__["_has_met"] = True

        unused: list[Span] = []
        if self.skips_unused:
            flags = yield Gather(self._used(gradient))
            used = torch.stack(list(flags)).amax(dim=0).tolist()
            unused = [
                span for span, is_used in zip(self.segments.spans, used, strict=True) if not is_used
            ]
            self._leave_out(unused, taken.indices, taken.values)

        desk = Desk(self, gradient, after[LEDGER], call, meter)
        yield from self.scheme.collective.meet(taken.indices, taken.values, desk)
        for span in unused:
            self._undo(span, gradient, before, after)
        self._narrow(after, kept, call)
        return Finding(self.segments, desk.context, desk.damage, taken.unsound)

    def _widened(self, fields: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The memory in the type that sums are made in: itself, or a copy."""
        if self.scheme.memory.kept_as(self.dtype) == self.dtype:
            return fields
        return {name: tensor.to(self.dtype) for name, tensor in fields.items()}

    def _narrow(self, wide: Mapping[str, Tensor], kept: Mapping[str, Tensor], call: Call) -> None:
        """Round what was widened, at random: right on average."""
        draw = Draw(self.scheme.seed, call.step, call.rank)
        for field, tensor in kept.items():
            if tensor is wide[field]:
                continue
            key = fold(draw.key(shared=False), name_key(field))
            for span, view in self.segments.views(tensor):  # wherever it lies: DDP moves it
                source = wide[field][span.start : span.stop]
                kernels.on(view.device).narrow(source, view, fold(key, name_key(span.name)))

    @cached_property
    def _has_met(self) -> bool:
        """Whether the ranks have compared headers, so that they agree on scheme and sizes."""
        return False

    def _count(self, taken: Taken, meter: Meter) -> None:
        """Note how many coordinates were chosen."""
        meter.aimed_at += sum(piece.count for piece in self.segments.pieces)
        meter.selected = meter.selected + taken.count

    def context(self, call: Call) -> Context:
        """What the digests of all messages of this exchange are keyed with."""
        return Context(call.step, call.bucket, *self._fingerprints)

    def _header(self, call: Call) -> Header:
        scheme, layout = self._fingerprints
        return Header(call.rank, call.step, call.bucket, scheme, layout, self.message_bytes)

    def _used(self, gradient: Tensor) -> Tensor:
        """One byte per parameter: 1 if any of its gradient is not zero."""
        return torch.stack([view.any() for _, view in self.segments.views(gradient)]).byte()

    def _withdraw(
        self,
        gradient: Tensor,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        call: Call,
    ) -> Taken:
        memory = self.scheme.memory
        addend = memory.addend(gradient, before, after, self.segments, call.world)
        draw = Draw(self.scheme.seed, call.step, call.rank)
        taken = self.scheme.selector.withdraw(
            memory.ledger(before), addend, after[LEDGER], self.segments, draw
        )
        memory.settle(after, taken.indices)
        return taken

    def _leave_out(self, unused: Sequence[Span], indices: Tensor, values: Tensor) -> None:
        """Send nothing of these parameters."""
        for span in unused:
            inside = (indices >= span.start) & (indices < span.stop)
            values[: indices.numel()][inside] = 0
            at = indices.numel()
            for start, stop in self.segments.whole_runs:
                low, high = max(start, span.start), min(stop, span.stop)
                if low < high:
                    values[at + low - start : at + high - start] = 0
                at += stop - start

    @staticmethod
    def _undo(
        span: Span, gradient: Tensor, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
    ) -> None:
        """Nothing happened to this parameter, even where a codec reads a zero as something else."""
        gradient[span.start : span.stop] = 0
        for name, remembered in before.items():
            after[name][span.start : span.stop] = remembered[span.start : span.stop]
