"""All-reduce: values are summed in transit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import kernels
from ..kernels.reference import finite
from ..layout import Entries, MessageLayout
from ..message import FINE, VALUES, corruption_code
from ..requests import Routine
from ..segments import Segments
from ..sums import reduce_traffic, sum_over_ranks
from .base import Coding, Collective, CollectivePlan, Transfer


@dataclass(frozen=True, repr=False)
class AllReduce(Collective):
    """Values at the same coordinates are summed in transit, in rank order. No index is sent.

    It needs a selector with which all ranks send the same coordinates, and a value codec whose
    values can be summed. Traffic hardly grows with the number of ranks.

    >>> import sparsewire as sw
    >>> sw.Scheme(sw.BlockRandomK(0.01, shared=True)).collective
    AllReduce()
    """

    adds = True

    def plan(
        self, coding: Coding, segments: Segments, world_size: int, dtype: torch.dtype
    ) -> AllReducePlan:
        layout = MessageLayout(coding.indices, coding.values, segments)
        return AllReducePlan(layout, world_size, dtype)

    def why(self, coding: Coding) -> str:
        return (
            f"all ranks send the same coordinates with {type(coding.selector).__name__}, so values "
            f"are summed in transit"
        )


class AllReducePlan(CollectivePlan):
    """A sum over all ranks, in rank order."""

    def __init__(self, layout: MessageLayout, world_size: int, dtype: torch.dtype) -> None:
        self.layout = layout
        width, sum_width = layout.values.dtype.itemsize, dtype.itemsize
        self.traffic = reduce_traffic(layout.value_count, width, sum_width, world_size)
        self.message_bytes = {}

    def run(self, entries: Entries, transfer: Transfer) -> Routine[None]:
        with transfer.counters.stage("encode"):
            data, (indices, _) = transfer.encode(self.layout, entries)
        total = yield from transfer.counters.timed(
            "decode",
            sum_over_ranks(
                data.view(self.layout.values.dtype),
                entries[1].dtype,
                transfer.context,
                transfer.rank,
                transfer.world_size,
                transfer.work,
                transfer.share,
            ),
        )
        with transfer.counters.stage("decode"):
            transfer.note(total.corruption)
            overflow = corruption_code(transfer.rank, VALUES)
            transfer.note(torch.where(finite(total.values), FINE, overflow))
            kernel = kernels.on(transfer.gradient.device)
            received = [(indices, total.values)]
            kernel.add_up(transfer.gradient, received, 1.0, self.layout.segments, transfer.work)
