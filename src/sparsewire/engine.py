"""The five steps, for one scheme and one cut gradient: deposit, withdraw, write, exchange, apply.

`Exchange.run` is a generator that yields what it wants communicated and is sent the answer. It
knows nothing of networks, threads or devices; the drivers in `groups/` carry its requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from . import kernels
from .collectives import Sharded
from .collectives.sums import reduce_traffic
from .council import Council
from .desk import Call, Desk, leave_out
from .form import Form
from .indices import EliasFano, Implied, IndexCodec
from .kernels import Taken
from .memory import LEDGER
from .message import (
    FINE,
    HEADER_BYTES,
    VERDICT_BYTES,
    Context,
    Header,
    compare,
    fingerprint,
    layout_fingerprint,
    pack_verdict,
    sealed_bytes,
    settle,
)
from .meter import Meter
from .randomness import fold, name_key
from .requests import Routine, all_gather, broadcast_traffic, gather_traffic
from .scheme import Scheme
from .segments import Segments, Span
from .selectors import Coordination, Draw
from .sharddesk import ShardDesk
from .shards import OWNED, Shards
from .values import ValueCodec
from .workspace import Workspace


@dataclass(frozen=True)
class Unsound:
    """NaN or infinity, by rank and first parameter."""

    parameters: Mapping[int, str]
    who: str = "rank"

    def __str__(self) -> str:
        return "; ".join(f"{self.who} {rank} in {name}" for rank, name in self.parameters.items())


@dataclass(frozen=True)
class Finding:
    """What one rank found in one exchange; on a GPU not known until somebody looks."""

    segments: Segments
    context: Context
    damage: Tensor
    unsound: Tensor


def agree(findings: Sequence[Finding], rank: int) -> Routine[Unsound | None]:
    """Compare with all ranks what was found in the exchanges of a step.

    Returns None if every gradient now holds the mean. Raises `DamageError`, on all ranks, if any
    message was bad.
    """
    own = [pack_verdict(f.damage, f.unsound, f.context.key(rank)) for f in findings]
    answers = yield all_gather(torch.cat(own))
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
    def form(self) -> Form:
        """The layout of a message with all that a rank sends."""
        negotiated = self.scheme.selector.coordination is Coordination.NEGOTIATED
        indices = Implied() if negotiated else self.scheme.indices  # all know them already
        return Form(indices, self.scheme.values, self.segments)

    @property
    def message_bytes(self) -> int:
        """Bytes of one such message."""
        return self.form.nbytes

    @property
    def value_count(self) -> int:
        """Values in one such message."""
        return self.form.value_count

    @property
    def value_width(self) -> int:
        """Bytes of a value that travels to be added up."""
        return self.scheme.values.dtype.itemsize

    @property
    def sum_width(self) -> int:
        """Bytes of a sum of values."""
        return self.dtype.itemsize

    def notice(self, world: int) -> Segments:
        """The pieces, with as many coordinates as one of `world` ranks may name before the choice.

        Only where coordinates are named.
        """
        if world not in self._notices:
            names = self.scheme.selector.names
            counts = [names(piece.count, world) for piece in self.segments.pieces]
            pieces = zip(self.segments.pieces, counts, strict=True)
            named = tuple(replace(piece, count=count, room=count) for piece, count in pieces)
            self._notices[world] = replace(self.segments, pieces=named)
        return self._notices[world]

    def notice_bytes(self, world: int) -> int:
        """Bytes of the message in which a rank names coordinates; 0 if none does."""
        if self.scheme.selector.proposers == "none" or not self.segments.pieces:
            return 0
        return sealed_bytes(self.scheme.indices.nbytes(self.notice(world)))

    def shards(self, world: int) -> Shards:
        """The gradient shared out among `world` owners."""
        if world not in self._shards:
            collective, selector = self.scheme.collective, self.scheme.selector
            assert isinstance(collective, Sharded)
            self._shards[world] = Shards(
                self.segments, world, collective.pull_ratio, selector.clustered
            )
        return self._shards[world]

    def shard(self, rank: int, world: int) -> Segments | None:
        """What a rank owns, if there are owners."""
        is_sharded = isinstance(self.scheme.collective, Sharded)
        return self.shards(world).result(rank) if is_sharded else None

    def push_forms(self, world: int) -> list[Form]:
        """The layout of a message to each owner; all have one length."""
        key = ("push", world)
        if key not in self._forms:
            parts = [self.shards(world).part(owner) for owner in range(world)]
            self._forms[key] = _of_one_length(self.scheme.indices, self.scheme.values, parts)
        return self._forms[key]

    def pull_forms(self, world: int) -> list[Form]:
        """The layout of each owner's message; all have one length."""
        key = ("pull", world)
        if key not in self._forms:
            results = [self.shards(world).result(owner) for owner in range(world)]
            indices = self.scheme.indices if self.scheme.indices.written else EliasFano()
            self._forms[key] = _of_one_length(indices, self.scheme.values, results)
        return self._forms[key]

    def push_bytes(self, world: int) -> int:
        """Bytes of one rank's message to one owner."""
        return self.push_forms(world)[0].nbytes

    def pull_bytes(self, world: int) -> int:
        """Bytes of one owner's message to all."""
        return self.pull_forms(world)[0].nbytes

    @cached_property
    def _shards(self) -> dict[int, Shards]:
        return {}

    @cached_property
    def _notices(self) -> dict[int, Segments]:
        return {}

    @cached_property
    def _forms(self) -> dict[tuple[str, int], list[Form]]:
        return {}

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
        payload = self.scheme.collective.traffic(self, world)
        return (world - 1) * (ahead + VERDICT_BYTES) + self.talk_traffic(world) + payload

    def talk_bytes(self, world: int) -> int:
        """Bytes of what a rank says before the choice: numbers to add up, or coordinates."""
        return 4 * self.scheme.selector.summed(self.segments) + self.notice_bytes(world)

    def talk_traffic(self, world: int) -> int:
        """Bytes of it that are said before the choice."""
        count = self.scheme.selector.summed(self.segments)
        added = reduce_traffic(count, 4, 4, world) if count else 0
        led = self.scheme.selector.proposers == "leader"
        carried = broadcast_traffic if led else gather_traffic
        return added + carried(self.notice_bytes(world), world)

    def run(
        self,
        gradient: Tensor,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        call: Call,
        meter: Meter,
        work: Workspace,
    ) -> Routine[Finding]:
        """Exchange one flat gradient, which ends up holding the mean over all ranks.

        Reads the memory `before` and writes `after`; it is for the caller to keep `after`, or not,
        once the ranks `agree`. `work` is this rank's own, and may serve many exchanges in turn.
        """
        kept, after = after, self._widened(after)
        before = self._widened(before)
        waits = gradient.device.type != "cpu"  # to look at a number there

        if self._fingerprints not in work.met or (call.opens and not waits):
            header = self._header(call)
            answers = yield all_gather(header.pack())
            headers = [Header.unpack(data, rank) for rank, data in enumerate(answers)]
            compare(headers, header, repr(self.scheme))
            work.met.add(self._fingerprints)

        unused: list[Span] = []
        if self.skips_unused:
            flags = yield all_gather(self._used(gradient))
            used = torch.stack(list(flags)).amax(dim=0).tolist()
            unused = [
                span for span, is_used in zip(self.segments.spans, used, strict=True) if not is_used
            ]

        council = self._council(call, gradient.device, work)
        withdrawal = self._withdraw(gradient, before, after, call, council)
        taken = yield from meter.timed("select", withdrawal)
        meter.deposited[self.segments.spans] = taken.squares
        meter.unsound = taken.unsound
        self._count(taken, meter)
        leave_out(unused, taken.indices, taken.values, self.segments)

        shard = self.shard(call.rank, call.world)
        desk = self.desk(gradient, before, after, call, meter, work, unused)
        desk.damage = council.damage
        yield from self.scheme.collective.meet(taken.indices, taken.values, desk)
        for span in unused:
            gradient[span.start : span.stop] = 0
        self._undo(unused, before, after, shard)
        self._narrow(after, kept, call, shard)
        unsound = torch.where(taken.unsound == FINE, desk.unsound, taken.unsound)
        return Finding(self.segments, desk.context, desk.damage, unsound)

    def desk(
        self,
        gradient: Tensor,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        call: Call,
        meter: Meter,
        work: Workspace,
        unused: Sequence[Span] = (),
    ) -> Desk:
        """Return the desk where one rank's messages are written and read."""
        scheme, world = self.scheme, call.world
        parts = (self.form, scheme.selector, scheme.seed, call, self.context(call))
        tensors = (gradient, after[LEDGER])
        if OWNED not in scheme.collective.fields:
            return Desk(*parts, *tensors, meter, work)
        forms = (self.push_forms(world), self.pull_forms(world))
        owned = (before.get(OWNED), after[OWNED])
        return ShardDesk(*parts, *tensors, meter, work, self.shards(world), *forms, *owned, unused)

    def _council(self, call: Call, device: torch.device, work: Workspace) -> Council:
        return Council(
            self.scheme.indices,
            self.segments,
            self.notice(call.world),
            self.notice_bytes(call.world),
            replace(self.context(call), is_ahead=True),
            call,
            device,
            work,
        )

    def _widened(self, fields: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The memory in the type that sums are made in: itself, or a copy."""
        if self.scheme.memory.kept_as(self.dtype) == self.dtype:
            return fields
        return {name: tensor.to(self.dtype) for name, tensor in fields.items()}

    def _narrow(
        self,
        wide: Mapping[str, Tensor],
        kept: Mapping[str, Tensor],
        call: Call,
        shard: Segments | None,
    ) -> None:
        """Round what was widened, at random: right on average."""
        draw = Draw(self.scheme.seed, call.step, call.rank)
        for field, tensor in kept.items():
            if tensor is wide[field]:
                continue
            key = fold(draw.key(shared=False), name_key(field))
            segments = shard if field == OWNED and shard is not None else self.segments
            for span, view in segments.views(tensor):  # wherever it lies: DDP moves it
                source = wide[field][span.start : span.stop]
                kernels.on(view.device).narrow(source, view, fold(key, name_key(span.name)))

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
        council: Council,
    ) -> Routine[Taken]:
        memory = self.scheme.memory
        addend = memory.addend(gradient, before, after, self.segments, call.world)
        draw = Draw(self.scheme.seed, call.step, call.rank)
        taken = yield from self.scheme.selector.choose(
            memory.ledger(before), addend, after[LEDGER], self.segments, draw, council
        )
        memory.settle(after, taken.indices)
        return taken

    def _undo(
        self,
        unused: Sequence[Span],
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        shard: Segments | None,
    ) -> None:
        """Nothing happened to these parameters, even where a codec reads a zero otherwise."""
        names = {span.name for span in unused}
        for field, remembered in before.items():
            segments = shard if field == OWNED and shard is not None else self.segments
            for span in segments.spans:
                if span.name in names:
                    after[field][span.start : span.stop] = remembered[span.start : span.stop]


def _of_one_length(
    indices: IndexCodec, values: ValueCodec, shards: Sequence[Segments]
) -> list[Form]:
    """Forms for messages of all these, the shorter ones filled up to the longest."""
    longest = max(Form(indices, values, shard).nbytes for shard in shards)
    return [Form(indices, values, shard, longest) for shard in shards]
