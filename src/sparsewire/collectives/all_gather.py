"""All-gather: every rank receives every message."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..requests import Routine, all_gather, gather_traffic
from .base import Collective, Desk, Sizes


@dataclass(frozen=True, repr=False)
class AllGather(Collective):
    """Every rank receives every rank's message and adds them up itself, in rank order."""

    adds = False

    def meet(self, indices: Tensor, values: Tensor, desk: Desk) -> Routine[None]:
        messages = yield all_gather(desk.write(indices, values))
        desk.apply(desk.read(messages), desk.share)

    def traffic(self, sizes: Sizes, world: int) -> int:
        return gather_traffic(sizes.message_bytes, world)
