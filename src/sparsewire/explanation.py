"""Predict what a scheme sends from sizes alone: no gradient, no network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

__all__ = ["Explanation", "explain"]

WORTH_SAYING = 1.05  # times less that another collective sends


@dataclass(frozen=True)
class Explanation:
    """The sizes of one exchange, per rank and step. `print(explanation)` shows them.

    All sizes assume that all parameters are in one message. DDP sends one message per bucket, and
    each of them has a header of its own.

    Attributes:
        scheme: The scheme's text.
        collective: The collective's text.
        why: Why it is this collective.
        workers: The number of workers that exchange.
        parameters: The number of gradient values.
        selected: The number of values that the selector picks.
        sent_densely: The number of values that are sent densely.
        header_bytes: The size of the header, which ranks compare before a message.
        index_bytes: The size of the indices in one message.
        value_bytes: The size of the values in one message.
        padding_bytes: Bytes that fill a message up to a multiple of eight.
        check_bytes: The size of a message's checksum, and of the status on all messages of a step.
        sent_bytes: The bytes that each worker sends; it receives as many.
        dense_float32_bytes: The bytes that a dense ring all-reduce in float32 would send.
        dense_bfloat16_bytes: The same in bfloat16.
        memory_bytes: The size of everything that a worker keeps from step to step.
        warmup: What the warm-up does, or an empty text.
        push_bytes: With `Sharded`, the size of a message to one owner, else 0.
        pull_bytes: With `Sharded`, the size of one owner's message to all workers, else 0.
        negotiation_bytes: With `TopBlock`, `LeaderTopK` and `UnionTopK`, the size of what a worker
            tells the others before they select, else 0.
        negotiation: What that message holds, or an empty text.
        advice: Another collective that would send less on this many workers, or an empty text.
        every: The number of local steps between two exchanges of updates, else 1.
        weights_bytes: The part of `memory_bytes` that an exchange of updates keeps beside the
            residual, else 0.
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
        """Return all fields as a dictionary that JSON can hold."""
        return asdict(self)

    def __str__(self) -> str:
        share = 100 * (self.selected + self.sent_densely) / max(1, self.parameters)
        agreement = f"{human_bytes(self.negotiation_bytes)} = {self.negotiation}"
        rows = {
            "sends": f"{self.selected:,} selected + {self.sent_densely:,} sent densely of "
            f"{plural(self.parameters, 'value')} ({share:.2f} %)",
            "messages" if self.push_bytes else "message": self._message(),
            "agreement": agreement if self.negotiation else "",
            "collective": f"{self.collective}: {self.why}",
            "traffic": self._traffic(),
            "dense": f"{self._dense(self.dense_float32_bytes, 'float32')}, "
            f"{self._dense(self.dense_bfloat16_bytes, 'bfloat16')}",
            "memory": self._memory(),
            "instead": self.advice,
            "warm-up": self.warmup,
        }
        return "\n".join([self.scheme, *(f"  {k:<13}{text}" for k, text in rows.items() if text)])

    def _message(self) -> str:
        """Return the sizes of a message, or of both kinds of messages with `Sharded`."""
        if self.push_bytes:
            push, pull = human_bytes(self.push_bytes), human_bytes(self.pull_bytes)
            return f"{push} to each owner, {pull} from each of them"
        parts = (self.header_bytes, self.index_bytes, self.value_bytes, self.padding_bytes)
        size = sum(parts) + self.check_bytes
        return (
            f"{human_bytes(size)} = header {self.header_bytes} B + indices "
            f"{human_bytes(self.index_bytes)} + values {human_bytes(self.value_bytes)} "
            f"({8 * size / max(1, self.parameters):.3f} bits per parameter)"
        )

    def _traffic(self) -> str:
        if self.workers == 1:
            return "none, since 1 worker has nobody to exchange with"
        per = f"round of {self.every} local steps" if self.every > 1 else "step"
        return (
            f"{human_bytes(self.sent_bytes)} sent and as much received per {per} "
            f"by each of {self.workers} workers"
        )

    def _dense(self, size: int, dtype: str) -> str:
        """Return what a dense exchange would send, and how much less or more is sent now."""
        sent = self.sent_bytes
        if not sent:
            ratio = "nothing is sent"
        else:
            ratio = f"{size / sent:.1f}x less" if sent <= size else f"{sent / size:.1f}x more"
        return f"{human_bytes(size)} in {dtype} ({ratio})"

    def _memory(self) -> str:
        memory = f"{human_bytes(self.memory_bytes)} on each worker"
        if not self.weights_bytes:
            return memory
        return f"{memory}, {human_bytes(self.weights_bytes)} of it for shared weights and update"


def explain(
    scheme: AnyScheme | Selector | str,
    shapes: Mapping[str, Shape],
    workers: int,
    *,
    communicate: Literal["gradients", "updates"] = "gradients",
    every: int = 1,
    delay: int = 0,
) -> Explanation:
    """Return what a scheme sends in one step, from sizes alone: no gradient, no network.

    Arguments:
        scheme: The scheme: a `Scheme`, a `Warmup`, a selector, or the text of any of them.
        shapes: The shapes of the parameters by name.
        workers: How many workers exchange.
        communicate: `'gradients'` or `'updates'`, as for `attach`. So are the next two.
        every: The number of local steps between two exchanges of updates.
        delay: With 1, updates need one more copy of the weights.

    >>> import torch
    >>> import sparsewire as sw
    >>> net = torch.nn.Sequential(torch.nn.Linear(784, 256), torch.nn.Linear(256, 10))
    >>> shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
    >>> explanation = sw.explain("RandomK(0.01)", shapes, workers=4)
    >>> explanation.collective, explanation.index_bytes, explanation.sent_bytes
    ('AllReduce()', 0, 14136)
    >>> print(sw.explain("TopK(0.01)", shapes, workers=4))
    Scheme(TopK(0.01))
      sends        2,034 selected + 266 sent densely of 203,530 values (1.13 %)
      message      11.5 kB = header 64 B + indices 2.2 kB + values 9.2 kB (0.451 bits per parameter)
      collective   AllGather(): TopK picks different coordinates on every rank, so every rank needs every message
      traffic      34.4 kB sent and as much received per step by each of 4 workers
      dense        1.2 MB in float32 (35.5x less), 610.6 kB in bfloat16 (17.7x less)
      memory       1.6 MB on each worker
      instead      collective=Sharded() would send 1.8x less on 4 workers
    """  # noqa: E501
    if communicate not in ("gradients", "updates"):
        raise SchemeError(f"communicate must be 'gradients' or 'updates', not {communicate!r}")
    if communicate == "gradients" and (every, delay) != (1, 0):
        raise SchemeError("every and delay are options for communicate='updates'")
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
        warmup=_warmup(chosen, lambda first: explain(first, shapes, workers).sent_bytes),
        push_bytes=exchange.plan.message_bytes.get("push", 0),
        pull_bytes=exchange.plan.message_bytes.get("pull", 0),
        negotiation_bytes=exchange.negotiation.nbytes if exchange.negotiation else 0,
        negotiation=_negotiation(exchange.negotiation),
        advice=_advice(exchange, workers),
        every=every,
        weights_bytes=weights,
    )


def _negotiation(plan: NegotiationPlan | None) -> str:
    """Return what the ranks tell each other before they select, or an empty text."""
    if plan is None:
        return ""
    if plan.proposal and not plan.led:
        indices = plural(plan.proposal.segments.capacity, "index", "indices")
        return f"up to {indices} that each rank proposes first"
    if plan.proposal:
        return "the indices of one rank, a different one at each step, which it broadcasts first"
    return f"{plural(plan.added, 'norm')} of blocks, summed over all ranks first"


def _advice(exchange: Exchange, workers: int) -> str:
    """Return which other collective sends clearly less on this many workers, if any does."""
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
    """Return the size of the state, which exists twice; without a memory, that of one sum."""
    width = scheme.memory.kept_as(torch.float32).itemsize
    kept = sum(-(-size // workers) if field.extent == "owned" else size for field in scheme.fields)
    return 2 * width * kept or 4 * size


def _why(scheme: Scheme, segments: Segments) -> str:
    selector = type(scheme.selector).__name__
    own_reason = scheme.collective.why(Coding(scheme.selector, scheme.indices, scheme.values))
    if own_reason:
        return own_reason
    if not segments.sparse:
        few = "" if scheme.selector.sends_all else f"{selector} has nothing left to select, so "
        return f"{few}everything is sent; with Dense() the values would be summed in transit"
    if scheme.selector.coordination.is_shared and not scheme.values.linear:
        codec = type(scheme.values).__name__
        return f"{codec} values cannot be summed in transit, so every rank needs every message"
    if scheme.selector.coordination.is_shared:
        return "as asked; all ranks send the same coordinates, so AllReduce() would work too"
    if scheme.selector.coordination.is_seeded:
        return (
            f"every rank draws its own coordinates with {selector}, and the others can derive "
            f"them, so no index is sent"
        )
    return (
        f"{selector} picks different coordinates on every rank, so every rank needs every message"
    )


def _warmup(scheme: AnyScheme, bytes_of: Callable[[Scheme], int]) -> str:
    if not isinstance(scheme, Warmup):
        return ""
    steps = plural(scheme.steps, "step")
    if scheme.ratio is not None:
        sent = human_bytes(bytes_of(scheme.at(0)))
        start = f"a ratio of {scheme.ratio:g} for {steps}, with {sent} sent in each"
    else:
        start = f"the ratio is eased in over {steps}" if scheme.ease else f"dense for {steps}"
    return f"{start}; the sizes above apply afterwards"
