"""The five steps for one flat gradient: accumulate, select, encode, communicate, decode.

`Exchange.run` is a routine: a generator that yields communication requests and receives the
answers. It contains no network, thread or device code; the drivers in `groups/` carry out the
requests. The last three steps belong to the collective, in `collectives/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from . import kernels
from .codecs import Implied
from .collectives import Coding, CollectivePlan, Transfer
from .counters import Counters
from .kernels import Selection
from .layout import MessageLayout, leave_out
from .message import (
    FINE,
    HEADER_BYTES,
    STATUS_BYTES,
    USE,
    Context,
    Header,
    bytes_with_checksum,
    check_statuses,
    compare,
    fingerprint,
    gather_checked,
    gather_headers,
    layout_fingerprint,
    pack_status,
)
from .randomness import RandomKey, fold, name_key
from .requests import Routine
from .scheme import Scheme
from .segments import ParamSlice, Segments
from .selectors import Accumulation, Coordination, Negotiation, NegotiationPlan
from .state import RESIDUAL, StepState
from .workspace import Workspace


@dataclass(frozen=True)
class Call:
    """Identifies one exchange: the `step` and `bucket`, on rank `rank`.

    `opens` is True for the first exchange of a step. For `odd_local` see `Header`. `who` is
    the name for group members in error messages.
    """

    step: int
    rank: int
    bucket: int = 0
    opens: bool = True
    odd_local: int = 0
    who: str = "rank"


@dataclass(frozen=True)
class NonFinite:
    """The first parameter with NaN or infinity on each affected rank."""

    parameters: Mapping[int, str]
    who: str = "rank"

    def __str__(self) -> str:
        return "; ".join(f"{self.who} {rank} in {name}" for rank, name in self.parameters.items())


@dataclass(frozen=True)
class Finding:
    """One rank's findings in one exchange. On a GPU the tensors are not read until needed.

    `returned` is the part of the selected values that went back into the residual.
    """

    segments: Segments
    context: Context
    corruption: Tensor
    non_finite: Tensor
    selection: Selection
    returned: Tensor | None


class Exchange:
    """Runs a scheme over gradients, partitioned into `segments`, among `world_size` ranks.

    Arguments:
        scheme: The scheme to run.
        segments: The partition of the flat gradient.
        world_size: The number of ranks.
        dtype: The type of the gradient and of its sums.
        skips_unused: If True, a parameter whose gradient is zero on all ranks is left out, with its
            state, because DDP does not pass its mean to the optimizer
            (`find_unused_parameters`).
    """

    def __init__(
        self,
        scheme: Scheme,
        segments: Segments,
        world_size: int,
        dtype: torch.dtype = torch.float32,
        skips_unused: bool = False,
    ) -> None:
        self.scheme = scheme
        self.segments = segments
        self.world_size = world_size
        self.dtype = dtype
        self.skips_unused = skips_unused

    # -- sizes, known before communication ---------------------------------------------------------

    @cached_property
    def layout(self) -> MessageLayout:
        """The layout of a message that carries a rank's whole selection."""
        return MessageLayout(self._coding.indices, self._coding.values, self.segments)

    @cached_property
    def _coding(self) -> Coding:
        selector = self.scheme.selector
        negotiated = selector.coordination is Coordination.NEGOTIATED
        indices = Implied() if negotiated else self.scheme.indices  # all ranks know them already
        return Coding(selector, indices, self.scheme.values)

    @cached_property
    def plan(self) -> CollectivePlan:
        """The collective's protocol."""
        return self.scheme.collective.plan(self._coding, self.segments, self.world_size, self.dtype)

    @cached_property
    def negotiation(self) -> NegotiationPlan | None:
        """The sizes of the negotiation that precedes selection, or None."""
        indices = self.scheme.indices
        return self.scheme.selector.negotiation(indices, self.segments, self.world_size)

    @property
    def traffic(self) -> int:
        """The bytes that each rank sends, and receives, in the first exchange of a step."""
        flags = bytes_with_checksum(len(self.segments.params)) if self.skips_unused else 0
        ahead = HEADER_BYTES + flags
        negotiated = self.negotiation.traffic if self.negotiation else 0
        return (self.world_size - 1) * (ahead + STATUS_BYTES) + negotiated + self.plan.traffic

    def fields(self, rank: int) -> dict[str, Segments]:
        """Return the segments of each state field's flat tensor on `rank`, by field key."""
        fields = dict.fromkeys([RESIDUAL], self.segments)
        owned = self.plan.owned(rank)
        for field in (*self.scheme.fields, *self.scheme.collective.fields):
            if field.extent == "coordinate":
                fields[field.key] = self.segments
            elif owned is not None:
                fields[field.key] = owned
        return fields

    # -- the five steps ----------------------------------------------------------------------------

    def run(
        self, gradient: Tensor, state: StepState, call: Call, counters: Counters, work: Workspace
    ) -> Routine[Finding]:
        """Exchange one flat gradient, and replace it in place by the mean over all ranks.

        Reads `state.before` and writes `state.after`. The caller keeps or discards `after` once the
        ranks have compared statuses. `work` belongs to this rank and can be reused across
        exchanges.
        """
        yield from self._compare_headers(call, gradient.device, work)
        context = self.context(call)
        corruption = torch.full((), FINE, device=gradient.device)
        unused: list[ParamSlice] = []
        if self.skips_unused:
            unused, corruption = yield from self._find_unused(gradient, context, call.rank)
        wide = self._widened(state)
        negotiation = self._negotiation(context, call, gradient.device, work)

        # accumulate, select
        routine = self._select(gradient, wide, call, work, negotiation)
        selection = yield from counters.timed("select", routine)
        self._count(selection, counters)
        entries = selection.indices, selection.values
        leave_out(unused, entries, self.segments)

        # encode, communicate, decode
        transfer = Transfer(
            context=context,
            key=self._random_key(call),
            world_size=self.world_size,
            gradient=gradient,
            state=wide,
            unused=unused,
            counters=counters,
            work=work,
            corruption=corruption,
        )
        if negotiation is not None:
            transfer.note(negotiation.corruption)
        yield from self.plan.run(entries, transfer)

        self.scheme.memory.forget(wide)
        for param in unused:
            gradient[param.start : param.stop] = 0
        self._restore(unused, wide, call.rank)
        self._narrow(wide, state, call)
        non_finite = torch.where(
            selection.non_finite == FINE, transfer.non_finite, selection.non_finite
        )
        corruption, returned = transfer.corruption, transfer.returned
        return Finding(self.segments, context, corruption, non_finite, selection, returned)

    def context(self, call: Call) -> Context:
        """Return the context that keys the checksums of all messages of this exchange."""
        return Context(call.step, call.bucket, *self._fingerprints)

    @cached_property
    def _fingerprints(self) -> tuple[int, int]:
        unused = "skips unused" if self.skips_unused else ""
        return (
            fingerprint(self.scheme.identity, unused),
            layout_fingerprint(self.segments, self.dtype),
        )

    def header(self, call: Call) -> Header:
        """Return this rank's header, the first message of an exchange."""
        place = call.rank, call.step, call.bucket
        length = self.layout.nbytes
        return Header(*place, *self._fingerprints, length, odd_local=call.odd_local)

    def compares_headers(self, call: Call, device: torch.device, work: Workspace) -> bool:
        """Return whether this exchange starts by comparing headers.

        On a CPU, the first exchange of every step does. On a GPU, where reading an answer waits for
        the device, only the first exchange with this scheme and layout does.
        """
        is_known = self._fingerprints in work.met
        return not is_known or (call.opens and device.type == "cpu")

    def met(self, work: Workspace) -> None:
        """Note that the headers of this scheme and layout have been compared."""
        work.met.add(self._fingerprints)

    def _compare_headers(self, call: Call, device: torch.device, work: Workspace) -> Routine[None]:
        """Check that all ranks are about to run the same exchange."""
        if self.compares_headers(call, device, work):
            header = self.header(call)
            headers = yield from gather_headers(header, who=call.who)
            compare(headers, header, repr(self.scheme), call.who)
            self.met(work)

    def _find_unused(
        self, gradient: Tensor, context: Context, rank: int
    ) -> Routine[tuple[list[ParamSlice], Tensor]]:
        """Return the parameters whose gradient is zero on all ranks, and a corruption code."""
        params = self.segments.params
        used = torch.stack([view.any() for _, view in self.segments.views(gradient)]).byte()
        flags, corruption = yield from gather_checked(used, replace(context, purpose=USE), rank)
        on_any = torch.stack(flags).amax(dim=0).tolist()
        unused = [param for param, is_used in zip(params, on_any, strict=True) if not is_used]
        return unused, corruption

    def _negotiation(
        self, context: Context, call: Call, device: torch.device, work: Workspace
    ) -> Negotiation | None:
        if self.negotiation is None:
            return None
        return Negotiation(self.negotiation, context, call.rank, device, work)

    def _select(
        self,
        gradient: Tensor,
        state: StepState,
        call: Call,
        work: Workspace,
        negotiation: Negotiation | None,
    ) -> Routine[Selection]:
        memory, selector = self.scheme.memory, self.scheme.selector
        accumulation = Accumulation(
            state.before.get(RESIDUAL),
            memory.addend(gradient, state, self.segments, self.world_size),
            state.after[RESIDUAL],
        )
        key = self._random_key(call)
        if negotiation is None:
            selection = selector.select(accumulation, self.segments, key, state, work)
        else:
            selection = yield from selector.negotiate(
                accumulation, self.segments, key, state, negotiation
            )
        memory.mask(state, selection.indices)
        return selection

    def _random_key(self, call: Call) -> RandomKey:
        return RandomKey(self.scheme.seed, call.step, call.rank)

    def _count(self, selection: Selection, counters: Counters) -> None:
        """Record the number of selected coordinates and the gradient norms in the counters."""
        counters.accumulated[self.segments.params] = selection.squares
        counters.non_finite = selection.non_finite
        counters.aimed_at += sum(segment.count for segment in self.segments.sparse)
        counters.selected = counters.selected + selection.count

    # -- state in a type other than the gradient's -------------------------------------------------

    def _restore(self, unused: Sequence[ParamSlice], state: StepState, rank: int) -> None:
        """Restore the state of unused parameters, in case a codec decodes zeros as other values."""
        names = {param.name for param in unused}
        for key, segments in self.fields(rank).items() if names else ():
            if key not in state.before:
                continue
            for param in segments.params:
                if param.name in names:
                    place = slice(param.start, param.stop)
                    state.after[key][place] = state.before[key][place]

    def _widened(self, state: StepState) -> StepState:
        """Return the state in the accumulation type: the state itself, or a converted copy."""
        if self.kept_as == self.dtype:
            return state
        return StepState(
            {key: tensor.to(self.dtype) for key, tensor in state.before.items()},
            {key: tensor.to(self.dtype) for key, tensor in state.after.items()},
        )

    @property
    def kept_as(self) -> torch.dtype:
        """The storage type of state between steps."""
        return self.scheme.memory.kept_as(self.dtype)

    def _narrow(self, wide: StepState, state: StepState, call: Call) -> None:
        """Round widened state back to its storage type stochastically, without bias."""
        if wide is state:
            return
        for key, segments in self.fields(call.rank).items():
            seed = fold(self._random_key(call).key(shared=False), name_key(key))
            for param, view in segments.views(state.after[key]):  # not by position: DDP moves them
                source = wide.after[key][param.start : param.stop]
                kernels.on(view.device).narrow(source, view, fold(seed, name_key(param.name)))


def status_of(findings: Sequence[Finding], rank: int) -> Tensor:
    """Pack a rank's findings in all exchanges of a step into one status message."""
    return torch.cat(
        [pack_status(f.corruption, f.non_finite, f.context.status.key(rank)) for f in findings]
    )


def read_statuses(
    exchanges: Sequence[tuple[Segments, Context]], statuses: Tensor, who: str = "rank"
) -> NonFinite | None:
    """Check the statuses of all ranks for the exchanges of a step.

    Arguments:
        exchanges: The segments and context of each exchange.
        statuses: The status messages, in rank order.
        who: The name for group members in error messages.

    Returns:
        The parameters with NaN or infinity, or None if every gradient now holds the mean.

    Raises:
        CorruptMessageError: A message was corrupt; raised on all ranks.
    """
    said = statuses.cpu().view(-1, len(exchanges), STATUS_BYTES)
    for number, (segments, context) in enumerate(exchanges):
        bad = check_statuses(said[:, number].contiguous(), context, who)
        if bad:
            names = {rank: segments.params[param].name for rank, param in bad.items()}
            return NonFinite(names, who)
    return None
