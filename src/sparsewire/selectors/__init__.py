"""Selectors: which coordinates to send.

A selector is a frozen dataclass. A seeded one overrides `coordinates`, any other one `select`, and
a negotiated one `negotiation` and `negotiate` as well. To add one, write the class in a module of
this folder and name it in `ALL`: the parser, `sparsewire list` and the law tests follow.
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
"""All selectors, in the order in which `sparsewire list` shows them."""


def owner_selector(selector: Selector) -> Selector:
    """Return the selector that shard owners use: the same one if it looks at magnitudes.

    Arguments:
        selector: The selector of the ranks.
    """
    return TopK() if selector.coordination.is_seeded else selector
