"""What a contender loads a host with in one step, exactly, for any number of hosts.

The sizes follow from the scheme and from how DDP cuts the gradient into buckets; no gradient and
no network is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsewire.collectives.sums import CHUNK, chunk_sizes, share_size
from sparsewire.engine import Exchange
from sparsewire.groups.transport import gather_hops
from sparsewire.message import HEADER_BYTES
from sparsewire.report import dense_traffic
from sparsewire.scheme import as_scheme

from ..contenders import DENSE

Buckets = Sequence[Mapping[str, Sequence[int]]]
"""What is exchanged together: name and shape of its parameters."""


@dataclass(frozen=True)
class Load:
    """What one host does in one step.

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
        name: as it stands in tables.
        buckets: as DDP cut them.
    """

    def __init__(self, name: str, buckets: Buckets) -> None:
        self._values = [math.prod(shape) for bucket in buckets for shape in bucket.values()]
        self._buckets = len(buckets)
        self._scheme = None if name == DENSE else as_scheme(name).at(2**62)
        self._exchanges: list[Exchange] = []
        if self._scheme is not None:
            for bucket in buckets:
                shapes = {key: tuple(shape) for key, shape in bucket.items()}
                self._exchanges.append(Exchange(self._scheme, self._scheme.cut(shapes)))

    def on(self, hosts: int) -> Load:
        """The load of one of so many hosts."""
        others = hosts - 1
        if self._scheme is None:
            received = sum(dense_traffic(count, hosts, 4) for count in self._values)
            return Load(2 * others * self._buckets, received, looked_at=0, added=0)
        collective = self._scheme.collective
        # Only the first bucket of a step sends a header.
        spared = (self._buckets - 1) * others * HEADER_BYTES
        return Load(
            # a header and a verdict each step
            hops=2 + sum(_hops(exchange, hosts) for exchange in self._exchanges),
            received=sum(exchange.traffic(hosts) for exchange in self._exchanges) - spared,
            looked_at=sum(self._values) + (sum(self._values) // hosts if collective.fields else 0),
            added=sum(_added(exchange, hosts) for exchange in self._exchanges),
        )


def _hops(exchange: Exchange, hosts: int) -> int:
    """How often a host waits for another in one exchange."""
    collective, talk = exchange.scheme.collective, _talk_hops(exchange, hosts)
    if collective.adds:
        return talk + _sum_hops(exchange.value_count, exchange.sum_width, hosts)
    if collective.fields:
        return talk + 1 + gather_hops(exchange.pull_bytes(hosts), hosts)
    return talk + gather_hops(exchange.message_bytes, hosts)


def _talk_hops(exchange: Exchange, hosts: int) -> int:
    """What of it comes before the choice: norms are added up, what all ranks name is gathered, and
    a leader's message goes down a tree."""
    norms = exchange.scheme.selector.summed(exchange.segments)
    hops = _sum_hops(norms, 4, hosts) if norms else 0
    notice = exchange.notice_bytes(hosts)
    if notice and exchange.scheme.selector.proposers == "all":
        return hops + gather_hops(notice, hosts)
    return hops + ((hosts - 1).bit_length() if notice else 0)


def _sum_hops(count: int, width: int, hosts: int) -> int:
    """How often a host waits for another until `count` values are added up."""
    share = share_size(min(count, CHUNK), hosts) * width
    return len(chunk_sizes(count)) * (1 + gather_hops(share, hosts))


def _added(exchange: Exchange, hosts: int) -> int:
    """Values that one host adds up one by one in one exchange."""
    collective = exchange.scheme.collective
    if collective.adds:
        return exchange.value_count + exchange.scheme.selector.summed(exchange.segments)
    if collective.fields:
        parts = sum(form.value_count for form in exchange.push_forms(hosts))
        return parts + sum(form.value_count for form in exchange.pull_forms(hosts))
    return hosts * exchange.value_count
