"""How messages meet, so that every rank ends with the same mean. One file for each way."""

from __future__ import annotations

from .all_gather import AllGather
from .all_reduce import AllReduce
from .base import Coding, Collective, CollectivePlan, Transfer
from .sharded import Sharded

__all__ = [
    "ALL",
    "AllGather",
    "AllReduce",
    "Coding",
    "Collective",
    "CollectivePlan",
    "Sharded",
    "Transfer",
]

ALL: tuple[type[Collective], ...] = (AllGather, AllReduce, Sharded)
