"""Which coordinates travel.

A selector is a frozen dataclass: a seeded one overrides `coordinates`, any other `select`, and a
negotiated one `negotiation` and `negotiate` too. To add one, write the class in a module of this
folder and name it in `ALL`; parser, `sparsewire list`, docs and law tests follow from that.
"""

from __future__ import annotations

from .base import DEFAULT_RATIO, NO_STATE, Accumulation, Coordination, Selector, Sized
from .local import BlockRandomK, Dense, RandomK, Threshold, TopK
from .negotiated import LeaderTopK, TopBlock, UnionTopK
from .negotiation import Negotiation, NegotiationPlan

__all__ = [
    "ALL",
    "DEFAULT_RATIO",
    "NO_STATE",
    "Accumulation",
    "BlockRandomK",
    "Coordination",
    "Dense",
    "LeaderTopK",
    "Negotiation",
    "NegotiationPlan",
    "RandomK",
    "Selector",
    "Sized",
    "Threshold",
    "TopBlock",
    "TopK",
    "UnionTopK",
    "owner_selector",
]

ALL: tuple[type[Selector], ...] = (
    TopK,
    Threshold,
    RandomK,
    BlockRandomK,
    TopBlock,
    LeaderTopK,
    UnionTopK,
    Dense,
)


def owner_selector(selector: Selector) -> Selector:
    """Return the selector of a shard owner: the same rule, if it looks at magnitudes."""
    return TopK() if selector.coordination.is_seeded else selector
