"""The load of a step on one host, exactly, and its cost: a model fitted to measurements.

The loads follow from the scheme and from how DDP cuts the gradient into buckets, for any number of
hosts; no gradient and no network is needed. With W hosts on C cores, s = max(1, W/C) is how many
hosts a core serves, and

    step(W) − compute(W) ≈ a + l·hops + b·bytes + s·(c·bytes + d·looked_at + g·added)

No coefficient is below zero. They are the same for all contenders, who differ in their loads alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache

import numpy as np

from sparsewire.collectives.all_reduce import AllReducePlan
from sparsewire.collectives.sharded import ShardedPlan
from sparsewire.exchange import Exchange
from sparsewire.groups.transport import gather_hops
from sparsewire.message import HEADER_BYTES
from sparsewire.report import dense_traffic
from sparsewire.scheme import as_scheme
from sparsewire.segments import Segments
from sparsewire.selectors import NegotiationPlan
from sparsewire.sums import CHUNK, chunk_sizes, share_size

from ..contenders import DENSE

Buckets = Sequence[Mapping[str, Sequence[int]]]
"""The buckets of DDP: names and shapes of their parameters."""


@dataclass(frozen=True)
class Load:
    """The work of one host in one step.

    Args:
        hops: how often it waits for another: 2 (W−1) times for each bucket of dense DDP; once for
            a small all-gather and W−1 times for a large one, and once more to reach owners or
            those who add up.
        received: bytes, as many as it sends.
        looked_at: values that it selects from; as an owner, once more from its share.
        added: values that it adds up one by one: the selected ones of all hosts, or its own if
            they are added on the way, or as an owner a share of all and what all owners answer.
    """

    hops: int
    received: int
    looked_at: int
    added: int


class Loads:
    """The loads of one contender.

    Args:
        name: the contender's name in tables.
        buckets: as DDP cut them.
    """

    def __init__(self, name: str, buckets: Buckets) -> None:
        self._values = [math.prod(shape) for bucket in buckets for shape in bucket.values()]
        self._buckets = len(buckets)
        self._scheme = None if name == DENSE else as_scheme(name).at(2**62)
        self._segments: list[Segments] = []
        self.on = cache(self._on)  # one takes up to 0.1 s, and is asked for many times
        if self._scheme is not None:
            for bucket in buckets:
                shapes = {key: tuple(shape) for key, shape in bucket.items()}
                self._segments.append(self._scheme.partition(shapes))

    def _on(self, hosts: int) -> Load:
        """Return the load of each host when `hosts` take part."""
        others = hosts - 1
        if self._scheme is None:
            received = sum(dense_traffic(count, hosts, 4) for count in self._values)
            return Load(2 * others * self._buckets, received, looked_at=0, added=0)
        collective = self._scheme.collective
        exchanges = [Exchange(self._scheme, segments, hosts) for segments in self._segments]
        # Only the first bucket of a step sends a header.
        spared = (self._buckets - 1) * others * HEADER_BYTES
        return Load(
            # a header and a verdict each step
            hops=2 + sum(map(_hops, exchanges)),
            received=sum(exchange.traffic for exchange in exchanges) - spared,
            looked_at=sum(self._values) + (sum(self._values) // hosts if collective.fields else 0),
            added=sum(map(_added, exchanges)),
        )


def _hops(exchange: Exchange) -> int:
    """Return how often a host waits for another in one exchange."""
    plan, hosts = exchange.plan, exchange.world_size
    talk = _talk_hops(exchange.negotiation) if exchange.negotiation else 0
    if isinstance(plan, AllReducePlan):
        return talk + _sum_hops(plan.layout.value_count, exchange.dtype.itemsize, hosts)
    if isinstance(plan, ShardedPlan):
        return talk + 1 + gather_hops(plan.message_bytes["pull"], hosts)
    return talk + gather_hops(exchange.layout.nbytes, hosts)


def _talk_hops(plan: NegotiationPlan) -> int:
    """What of it comes before the choice: norms are added up, what all ranks name is gathered, and
    a leader's message goes down a tree."""
    hops = _sum_hops(plan.added, 4, plan.world_size) if plan.added else 0
    if plan.proposal is None:
        return hops
    if plan.led:
        return hops + (plan.world_size - 1).bit_length()
    return hops + gather_hops(plan.proposal.nbytes, plan.world_size)


def _sum_hops(count: int, width: int, hosts: int) -> int:
    """Return how often a host waits for another until `count` values are added up."""
    share = share_size(min(count, CHUNK), hosts) * width
    return len(chunk_sizes(count)) * (1 + gather_hops(share, hosts))


def _added(exchange: Exchange) -> int:
    """Values that one host adds up one by one in one exchange."""
    plan, hosts = exchange.plan, exchange.world_size
    if isinstance(plan, AllReducePlan):
        norms = exchange.negotiation.added if exchange.negotiation else 0
        return plan.layout.value_count + norms
    if isinstance(plan, ShardedPlan):
        return sum(layout.value_count for layout in (*plan.push, *plan.pull))
    return hosts * exchange.layout.value_count


@dataclass(frozen=True)
class Measured:
    """One measured step, and compute alone on the same number of hosts, in seconds."""

    load: Load
    share: float  # hosts that a core serves, at least 1
    compute: float
    step: float


@dataclass(frozen=True)
class Model:
    """Seconds for each unit of a load."""

    step: float  # a
    hop: float  # l
    byte: float  # b, on the link
    move: float  # c, a core's work for a byte
    look: float  # d
    addition: float  # g

    def beyond(self, load: Load, share: float = 1.0) -> float:
        """Return the seconds that a step with this load takes beyond compute alone."""
        return float(np.dot(_terms(load, share), astuple(self)))


def share(hosts: int, cores: int) -> float:
    """Return how many hosts a core serves where `hosts` share `cores`.

    >>> share(8, 2), share(1, 2)
    (4.0, 1.0)
    """
    return max(1.0, hosts / cores)


def fit(points: Sequence[Measured]) -> Model:
    """Return the model with the least squared errors, each relative to the measured step."""
    from scipy.optimize import nnls  # takes 0.3 s, and only a finished measurement needs it

    rows = np.array([np.array(_terms(p.load, p.share)) / p.step for p in points])
    wanted = np.array([(p.step - p.compute) / p.step for p in points])
    scale = np.linalg.norm(rows, axis=0)  # terms differ by ten orders of magnitude
    scale[scale == 0] = 1.0
    found, _ = nnls(rows / scale, wanted)
    return Model(*(float(x) for x in found / scale))


def _terms(load: Load, share: float) -> tuple[float, ...]:
    return (
        1.0,
        load.hops,
        load.received,
        share * load.received,
        share * load.looked_at,
        share * load.added,
    )
