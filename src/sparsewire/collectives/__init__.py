"""How messages meet, so that every rank ends with the same mean. One file for each way."""

from __future__ import annotations

from .all_gather import AllGather
from .all_reduce import AllReduce
from .base import Collective
from .sharded import Sharded

__all__ = ["ALL", "AllGather", "AllReduce", "Collective", "Sharded"]

ALL: tuple[type[Collective], ...] = (AllGather, AllReduce, Sharded)
