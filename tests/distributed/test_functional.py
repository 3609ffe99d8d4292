"""`functional.exchange` between processes: who is late or fails is named, as with `attach`."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import sparsewire as sw
from sparsewire.groups import DistributedGroup

from ..cluster import Cluster


def _slow(seconds: float, timeout: float) -> tuple[str, float]:
    """Rank 1 computes for longer than the deadline after its first exchange."""
    rank = dist.get_rank()
    gradients = {"weight": torch.full((6, 4), float(rank))}
    group = DistributedGroup(timeout=timeout)
    state = sw.functional.init("TopK(0.5)", gradients)
    for step in range(2):
        if step and rank == 1:
            time.sleep(seconds)
        began = time.monotonic()
        try:
            _, state = sw.functional.exchange(gradients, state, group)
        except sw.SparsewireError as error:
            return str(error), time.monotonic() - began
    return "", 0.0


def test_a_slow_rank_is_named_and_says_what_it_did_last(four: Cluster) -> None:
    timeout = 8.0
    results = four.run(_slow, 2 * timeout, timeout)
    for rank in (0, 2, 3):
        said, _ = results[rank]
        assert "rank 1 of 4 is behind: it finished the exchange of step 0" in said
    said, seconds = results[1]
    assert "reported by rank" in said
    assert seconds < timeout, "it is told at once, and does not wait for the deadline"
