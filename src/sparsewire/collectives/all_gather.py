"""All-gather: every rank receives every message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..layout import Entries, MessageLayout
from ..message import REASONS, first_corruption
from ..requests import Routine, all_gather, gather_traffic
from ..segments import Segments
from ..selectors import Selector
from .base import Coding, Collective, CollectivePlan, Transfer


@dataclass(frozen=True, repr=False)
class AllGather(Collective):
    """Every rank receives every message, and sums them itself in rank order.

    It works with every selector and codec. Each rank sends its message to all others, so traffic
    grows with the number of ranks.

    >>> import sparsewire as sw
    >>> scheme = sw.Scheme(sw.RandomK(0.01), collective=sw.AllGather())
    >>> print(sw.explain(scheme, {"w": (1000, 1000)}, workers=8).why)
    as asked; all ranks send the same coordinates, so AllReduce() would work too
    """

    adds = False

    def plan(
        self, coding: Coding, segments: Segments, world_size: int, dtype: torch.dtype
    ) -> AllGatherPlan:
        layout = MessageLayout(coding.indices, coding.values, segments)
        return AllGatherPlan(coding.selector, layout, world_size)


class AllGatherPlan(CollectivePlan):
    """One message from every rank to all others."""

    def __init__(self, selector: Selector, layout: MessageLayout, world_size: int) -> None:
        self.layout = layout
        self.traffic = gather_traffic(layout.nbytes, world_size)
        self.message_bytes = {}
        self._selector = selector

    def run(self, entries: Entries, transfer: Transfer) -> Routine[None]:
        with transfer.counters.stage("encode"):
            message, own = self.encode(entries, transfer)
        messages = yield all_gather(message)
        with transfer.counters.stage("decode"):
            received = self.decode(messages, own, transfer)
            gradient, segments = transfer.gradient, self.layout.segments
            kernel = kernels.on(gradient.device)
            kernel.add_up(gradient, received, transfer.share, segments, transfer.work)

    def encode(self, entries: Entries, transfer: Transfer) -> tuple[Tensor, Entries]:
        """Return this rank's message, and its entries as others will read them."""
        data, own = transfer.encode(self.layout, entries)
        return self.layout.pack(own[0], data, transfer.context.key(transfer.rank)), own

    def decode(self, messages: Sequence[Tensor], own: Entries, transfer: Transfer) -> list[Entries]:
        """Return the entries of all ranks; this rank's own need no decoding."""
        mine = transfer.rank
        received = [
            own if rank == mine else self.read(message, rank, own, transfer)
            for rank, message in enumerate(messages)
        ]
        key = transfer.context.common
        found = torch.ones(len(messages), len(REASONS), dtype=torch.bool, device=own[1].device)
        for others in (slice(0, mine), slice(mine + 1, len(messages))):
            if messages[others]:
                found[others] = self.layout.inspect(
                    messages[others], received[others], key, others.start
                )
        transfer.note(first_corruption(found))
        return received

    def read(self, message: Tensor, rank: int, own: Entries, transfer: Transfer) -> Entries:
        """Return the entries of another rank's message."""
        key, work = transfer.random_key(rank), transfer.work

        def coordinates() -> Tensor:
            if not self._selector.coordination.is_seeded:
                return own[0]  # negotiated, so the same on all ranks
            return self._selector.coordinates(self.layout.segments, key, message.device, work)

        return self.layout.decode(message, coordinates, key.key(shared=False), own[1].dtype, work)
