"""Attached DDP on real processes: against the simulated group, and against plain DDP."""

from __future__ import annotations

import itertools

import pytest
import torch

import sparsewire as sw

from ..cluster import Cluster
from .training import train_ddp, train_simulated

SELECTORS = {
    "TopK(0.05)": (),
    "Threshold(0.05)": (),
    "RandomK(0.05)": ("AllReduce()", "AllGather()"),
    "RandomK(0.05, shared=False)": (),
    "BlockRandomK(0.05)": (),
    "BlockRandomK(0.05, shared=True)": ("AllReduce()", "AllGather()"),
    "TopBlock(0.05, block=16)": ("AllReduce()", "AllGather()"),
    "LeaderTopK(0.05)": ("AllReduce()", "AllGather()"),
    "UnionTopK(0.05)": ("AllReduce()", "AllGather()"),
    "Dense()": ("AllReduce()", "AllGather()"),
}
SCOPES = ("'layer'", "'global'", "500")
GRID = [
    f"Scheme({selector}, scope={scope}{f', collective={collective}' if collective else ''})"
    for (selector, collectives), scope in itertools.product(SELECTORS.items(), SCOPES)
    for collective in collectives or ("",)
]
GRID += [
    f"Scheme({selector}, scope={scope}, collective=Sharded({ratio}){values})"
    for (selector, values), (scope, ratio) in itertools.product(
        (
            ("TopK(0.05)", ""),
            ("Threshold(0.05)", ", values=TwoBit()"),
            ("RandomK(0.05, shared=False)", ", values=QSGD()"),
            ("BlockRandomK(0.05)", ", memory=ErrorFeedback('bfloat16')"),
        ),
        (("'layer'", ""), ("'global'", "0.1"), ("500", "1.0")),
    )
]
# what depends on chance or on neighbours must not depend on how DDP cuts its buckets
GRID += [
    f"Scheme({selector}(0.05), {part}, scope={scope})"
    for selector in ("TopK", "Threshold")
    for part in (
        "values=QSGD()",
        "values=TwoBit()",
        "values=OneBit('column')",
        "memory=ErrorFeedback('bfloat16')",
    )
    for scope in ("'layer'", "500")
]


@pytest.mark.parametrize("scheme", GRID)
def test_real_processes_equal_the_simulated_group(four: Cluster, scheme: str) -> None:
    real = four.run(train_ddp, scheme)
    simulated = train_simulated(scheme, 4)
    for parameters in real:
        assert torch.equal(parameters, simulated)


def test_grid_covers_every_selector() -> None:
    named = {type(sw.parse(text).scope) and text.split("(")[0] for text in SELECTORS}
    assert named == {kind.__name__ for kind in sw.scheme.FAMILIES["selectors"]}
