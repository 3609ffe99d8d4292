"""Which coordinates travel.

A selector is a frozen dataclass that withdraws entries from the ledger: a seeded one says which
`coordinates`, any other overrides `withdraw`, and a negotiated one overrides `choose` too. To add
one: write the class in a module of this folder and name it in `ALL`; parser, `sparsewire list`,
docs and law tests follow from that.
"""

from __future__ import annotations

from .agreed import LeaderTopK, TopBlock, UnionTopK
from .base import DEFAULT_RATIO, Coordination, Draw, Selector, Sized, Table
from .own import BlockRandomK, Dense, RandomK, Threshold, TopK

__all__ = [
    "ALL",
    "DEFAULT_RATIO",
    "BlockRandomK",
    "Coordination",
    "Dense",
    "Draw",
    "LeaderTopK",
    "RandomK",
    "Selector",
    "Sized",
    "Table",
    "Threshold",
    "TopBlock",
    "TopK",
    "UnionTopK",
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
