"""Collectives: how messages reach the other ranks. Each one has a file of its own."""

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
"""All collectives."""
