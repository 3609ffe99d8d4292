"""A sharded parameter server: every rank owns a share of the coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..errors import SchemeError
from ..requests import Routine, all_gather, all_to_all, gather_traffic
from ..shards import OWNED
from .base import Collective, Desk, Sizes


@runtime_checkable
class Owner(Protocol):
    """What `Sharded` needs from it."""

    def push(self, indices: Tensor, values: Tensor) -> Tensor:
        """One rank's messages to all owners, a row each."""

    def settle(self, messages: Sequence[Tensor]) -> Tensor:
        """As owner: the message that answers those of all ranks."""

    def pull(self, messages: Sequence[Tensor]) -> None:
        """Write what all owners answered into the gradient."""


@dataclass(frozen=True, repr=False)
class Sharded(Collective):
    """Every rank owns a share of the coordinates, as in a parameter server, sparse both ways.

    A rank sends each owner the entries that are its own. The owner adds them up, adds what it
    remembers, and sends everybody the largest of that; the rest it keeps for later. What a rank
    receives does not grow with the number of ranks.

    Arguments:
        pull_ratio: the share of its coordinates that an owner sends back; as many as a rank sends
            if not given, and 1.0 for all that arrived, which grows with the number of ranks.

    Reference: Aji & Heafield 2017, section 3.
    """

    pull_ratio: float | None = None

    adds = False
    fields = (OWNED,)

    def __post_init__(self) -> None:
        ratio = self.pull_ratio
        if ratio is None:
            return
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
            raise SchemeError(
                f"Sharded(pull_ratio={ratio!r}) makes no sense: it is the share of its coordinates "
                f"that an owner sends back, above 0 and at most 1, as in Sharded(pull_ratio=0.01)"
            )
        object.__setattr__(self, "pull_ratio", float(ratio))

    def meet(self, indices: Tensor, values: Tensor, desk: Desk) -> Routine[None]:
        assert isinstance(desk, Owner)
        parts = yield all_to_all(desk.push(indices, values))
        results = yield all_gather(desk.settle(parts))
        desk.pull(results)

    def traffic(self, sizes: Sizes, world: int) -> int:
        return gather_traffic(sizes.push_bytes(world), world) + gather_traffic(
            sizes.pull_bytes(world), world
        )
