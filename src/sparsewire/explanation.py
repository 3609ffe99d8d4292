"""What a scheme will send, worked out from its sizes alone: no gradient, no network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

from .collectives import AllGather, AllReduce, Coding, Sharded
from .errors import SchemeError
from .exchange import Exchange
from .message import CHECKSUM_BYTES, HEADER_BYTES, STATUS_BYTES
from .report import dense_traffic, human_bytes, plural
from .scheme import AnyScheme, Scheme, Warmup, as_scheme
from .segments import Segments, Shape
from .selectors import NegotiationPlan, Selector

WORTH_SAYING = 1.05  # times less that another collective sends


@dataclass(frozen=True)
class Explanation:
    """The sizes of one exchange of all parameters as one message, per rank and step.

    With local steps, `every` of them belong to one exchange.
    """

    scheme: str
    collective: str
    why: str
    workers: int
    parameters: int
    selected: int
    sent_densely: int
    header_bytes: int
    index_bytes: int
    value_bytes: int
    padding_bytes: int
    check_bytes: int
    sent_bytes: int
    dense_float32_bytes: int
    dense_bfloat16_bytes: int
    memory_bytes: int
    warmup: str
    push_bytes: int = 0
    pull_bytes: int = 0
    negotiation_bytes: int = 0
    negotiation: str = ""
    advice: str = ""
    every: int = 1
    weights_bytes: int = 0  # of the memory: shared weights and the update, if updates are sent

    def to_dict(self) -> dict[str, object]:
        """The same for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        parts = (self.header_bytes, self.index_bytes, self.value_bytes, self.padding_bytes)
        message = sum(parts) + self.check_bytes
        share = 100 * (self.selected + self.sent_densely) / max(1, self.parameters)
        bits = 8 * message / max(1, self.parameters)
        ratio32, ratio16 = (
            _against(dense, self.sent_bytes)
            for dense in (self.dense_float32_bytes, self.dense_bfloat16_bytes)
        )
        local = f" of {self.every} local steps" if self.every > 1 else ""
        traffic = (
            f"{human_bytes(self.sent_bytes)} sent and as much received per "
            f"{f'round{local}' if local else 'step'} by each of {self.workers} workers"
            if self.workers > 1
            else "none, since 1 worker has nobody to exchange with"
        )
        memory = f"{human_bytes(self.memory_bytes)} on each worker"
        if self.weights_bytes:
            memory += f", {human_bytes(self.weights_bytes)} of it for shared weights and update"
        lines = [
            self.scheme,
            f"  sends        {self.selected:,} selected + {self.sent_densely:,} sent densely of "
            f"{plural(self.parameters, 'value')} ({share:.2f} %)",
            f"  message      {human_bytes(message)} = header {self.header_bytes} B + indices "
            f"{human_bytes(self.index_bytes)} + values {human_bytes(self.value_bytes)} "
            f"({bits:.3f} bits per parameter)",
            f"  collective   {self.collective}: {self.why}",
            f"  traffic      {traffic}",
            f"  dense        {human_bytes(self.dense_float32_bytes)} in float32 ({ratio32}), "
            f"{human_bytes(self.dense_bfloat16_bytes)} in bfloat16 ({ratio16})",
            f"  memory       {memory}",
        ]
        if self.push_bytes:
            ways = (
                f"{human_bytes(self.push_bytes)} to each owner, {human_bytes(self.pull_bytes)} "
                f"from each of them"
            )
            lines[2] = f"  messages     {ways}"
        if self.negotiation:
            lines.insert(
                3, f"  agreement    {human_bytes(self.negotiation_bytes)} = {self.negotiation}"
            )
        if self.advice:
            lines.append(f"  instead      {self.advice}")
        if self.warmup:
            lines.append(f"  warm-up      {self.warmup}")
        return "\n".join(lines)


def explain(
    scheme: AnyScheme | Selector | str,
    shapes: Mapping[str, Shape],
    workers: int,
    *,
    communicate: Literal["gradients", "updates"] = "gradients",
    every: int = 1,
    delay: int = 0,
) -> Explanation:
    """What `scheme` sends each step for parameters of these shapes on this many workers.

    `communicate`, `every` and `delay` are those of `attach`.

    >>> print(explain("TopK(0.01)", {"w": (1000, 1000)}, 4).sent_bytes)
    152400
    """
    if communicate not in ("gradients", "updates"):
        raise SchemeError(f"communicate is 'gradients' or 'updates', not {communicate!r}")
    if communicate == "gradients" and (every, delay) != (1, 0):
        raise SchemeError("every and delay are for communicate='updates'")
    chosen = as_scheme(scheme)
    full = chosen.at(2**62)
    exchange = Exchange(full, full.partition(shapes), workers)
    segments = exchange.segments
    # shared weights and the flat update, and with delay where the round began
    weights = 4 * segments.size * (2 + bool(delay)) if communicate == "updates" else 0
    return Explanation(
        scheme=repr(chosen),
        collective=repr(full.collective),
        why=_why(full, segments),
        workers=workers,
        parameters=segments.size,
        selected=sum(segment.count for segment in segments.sparse),
        sent_densely=segments.dense_size,
        header_bytes=HEADER_BYTES,
        index_bytes=exchange.layout.index_bytes,
        value_bytes=exchange.layout.value_bytes,
        padding_bytes=exchange.layout.padding_bytes,
        check_bytes=CHECKSUM_BYTES + STATUS_BYTES,
        sent_bytes=exchange.traffic,
        dense_float32_bytes=dense_traffic(segments.size, workers, 4),
        dense_bfloat16_bytes=dense_traffic(segments.size, workers, 2),
        memory_bytes=_memory_bytes(full, segments.size, workers) + weights,
        warmup=_warmup(chosen),
        push_bytes=exchange.plan.message_bytes.get("push", 0),
        pull_bytes=exchange.plan.message_bytes.get("pull", 0),
        negotiation_bytes=exchange.negotiation.nbytes if exchange.negotiation else 0,
        negotiation=_negotiation(exchange.negotiation),
        advice=_advice(exchange, workers),
        every=every,
        weights_bytes=weights,
    )


def _against(dense: int, sent: int) -> str:
    """How much less is sent than by a dense exchange, or more."""
    if not sent:
        return "nothing is sent"
    return f"{dense / sent:.1f}x less" if sent <= dense else f"{sent / dense:.1f}x more"


def _negotiation(plan: NegotiationPlan | None) -> str:
    """What the ranks say before they choose, if anything."""
    if plan is None:
        return ""
    if plan.proposal and not plan.led:
        indices = plural(plan.proposal.segments.capacity, "index", "indices")
        return f"up to {indices} of each rank, which it names to all others first"
    if plan.proposal:
        return "the indices of one rank, a different one each step, who names them to all first"
    return f"{plural(plan.added, 'norm')} of blocks, added up over all ranks first"


def _advice(exchange: Exchange, workers: int) -> str:
    """Another way for messages to meet, if one sends clearly less on so many workers."""
    if workers < 2 or not exchange.segments.sparse:
        return ""
    best, least = "", exchange.traffic / WORTH_SAYING
    for other in (AllGather(), AllReduce(), Sharded()):
        try:
            scheme = replace(exchange.scheme, collective=other)
        except SchemeError:
            continue  # it cannot go that way
        sent = Exchange(scheme, exchange.segments, workers).traffic
        if sent < least:
            less = exchange.traffic / sent
            best = f"collective={other!r} would send {less:.1f}x less on {workers} workers"
            least = sent
    return best


def _memory_bytes(scheme: Scheme, size: int, workers: int) -> int:
    """What is kept twice, since a step may fail; without memory, room for one sum."""
    width = scheme.memory.kept_as(torch.float32).itemsize
    kept = sum(-(-size // workers) if field.extent == "owned" else size for field in scheme.fields)
    return 2 * width * kept or 4 * size


def _why(scheme: Scheme, segments: Segments) -> str:
    selector = type(scheme.selector).__name__
    own_reason = scheme.collective.why(Coding(scheme.selector, scheme.indices, scheme.values))
    if own_reason:
        return own_reason
    if not segments.sparse:
        few = "" if scheme.selector.sends_all else f"nothing is left for {selector} to choose, so "
        return f"{few}everything is sent, and with Dense() it would be added on the way"
    if scheme.selector.coordination.is_shared and not scheme.values.linear:
        codec = type(scheme.values).__name__
        return f"messages in {codec} cannot be added on the way, so all must see all"
    if scheme.selector.coordination.is_shared:
        return "as asked; values at shared coordinates could also be added by AllReduce()"
    if scheme.selector.coordination.is_seeded:
        return (
            f"every rank draws its own coordinates with {selector}; the others can work them out, "
            f"so no index is sent"
        )
    return f"the coordinates of {selector} depend on each rank's gradient, so all must see all"


def _warmup(scheme: AnyScheme) -> str:
    if not isinstance(scheme, Warmup):
        return ""
    steps = plural(scheme.steps, "step")
    start = f"the ratio is eased in over {steps}" if scheme.ease else f"dense for {steps}"
    return f"{start}; sizes above are those after"
