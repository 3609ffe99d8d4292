"""All-reduce: values are added on the way."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..requests import Routine
from .base import Collective, Desk, Sizes
from .sums import reduce_traffic, sum_over_ranks


@dataclass(frozen=True, repr=False)
class AllReduce(Collective):
    """Values at the same coordinates are added on the way, in rank order; no index travels."""

    adds = True

    def meet(self, indices: Tensor, values: Tensor, desk: Desk) -> Routine[None]:
        narrow = desk.narrow(indices, values)
        total = yield from desk.meter.timed(
            "decode",
            sum_over_ranks(
                narrow, values.dtype, desk.context, desk.rank, desk.world, desk.work, desk.share
            ),
        )
        desk.apply([(indices, desk.check(total))], 1.0)

    def traffic(self, sizes: Sizes, world: int) -> int:
        return reduce_traffic(sizes.value_count, sizes.value_width, sizes.sum_width, world)
