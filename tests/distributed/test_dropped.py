"""A model that goes without `detach` takes along all that its exchange held."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw

from ..cluster import Cluster
from .training import CAP, loss_of, make_model, numbers, sgd

FORMS: dict[str, dict[str, Any]] = {
    "gradients": {},
    "updates": {"communicate": "updates"},
    "updates under DDP": {"communicate": "updates", "every": 2},
    "machines": {"intra_node": 2},
    "hook": {},
}


def _held() -> tuple[int, int, int, int]:
    """Threads, descriptors and process groups of this process, and keys in the store."""
    gc.collect()
    return (
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
        len(dist.distributed_c10d._world.pg_map),
        dist.distributed_c10d._get_default_store().num_keys(),
    )


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()


def _train_and_drop(form: str) -> None:
    plain = form == "updates"
    model = make_model() if plain else DDP(make_model(), bucket_cap_mb=CAP)
    optimizer = sgd(model)
    wire: Any
    if form == "hook":
        assert isinstance(model, DDP)
        wire = sw.SparseHookState(model, "TopK(0.05)")
        model.register_comm_hook(wire, sw.sparse_hook)
    else:
        wire = sw.attach(model, "TopK(0.05)", optimizer=optimizer, **FORMS[form])
    _train(model, optimizer)
    assert wire.steps >= 1


def _drop_many(form: str) -> list[tuple[int, int, int, int]]:
    held = []
    for _ in range(4):
        _train_and_drop(form)
        held.append(_held())
        dist.barrier()
    return held


@pytest.mark.parametrize("form", FORMS)
def test_a_dropped_model_leaves_nothing_behind(two: Cluster, four: Cluster, form: str) -> None:
    cluster = four if form == "machines" else two
    for held in cluster.run(_drop_many, form):
        assert len(set(held[1:])) == 1, held


def _drop_unevenly() -> tuple[list[float], list[int]]:
    """Rank 1 notices only a model later that the first one is gone."""
    kept: list[object] = []
    sums, groups = [], []
    for _ in range(4):
        model = DDP(make_model(), bucket_cap_mb=CAP)
        optimizer = sgd(model)
        sw.attach(model, "TopK(0.05)", optimizer=optimizer)
        _train(model, optimizer)
        sums.append(float(numbers(model).double().sum()))
        kept = [model] if dist.get_rank() == 1 else []
        del model, optimizer
        groups.append(_held()[2])
    del kept
    gc.collect()
    return sums, groups


def test_ranks_that_drop_a_model_at_different_times_meet_again(two: Cluster) -> None:
    results = two.run(_drop_unevenly)
    assert results[0][0] == results[1][0]
    assert len(set(results[0][0])) == 1
    for _, groups in results:
        assert groups[-1] == groups[1]  # two take turns
