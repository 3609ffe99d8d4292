"""Hundreds of schedules; a failing one is its own test, which tells the story and replays alone.

A longer run: SPARSEWIRE_SEEDS=1000 python -m pytest tests/simulation
"""

from __future__ import annotations

import os

import pytest

from .schedule import Schedule
from .teams import Scenario

SEEDS = int(os.environ.get("SPARSEWIRE_SEEDS", 24))
TOP = "Scheme(TopK(0.1), dense_below=16)"
SHARDED = "Scheme(TopK(0.1), collective=Sharded(), dense_below=16)"
UNION = "Scheme(UnionTopK(0.1), dense_below=16)"

SCENARIOS = {
    "all-gather": Scenario(TOP),
    "unused": Scenario(TOP, skips_unused=True),
    "sharded": Scenario(SHARDED),
    "all-reduce": Scenario("Scheme(RandomK(0.1), dense_below=16)"),
    "union": Scenario(UNION),
    "leader": Scenario("Scheme(LeaderTopK(0.1), dense_below=16)"),
    "machines": Scenario(TOP, machines=True),
    "machines-sharded": Scenario(SHARDED, machines=True),
    "machines-union": Scenario(UNION, machines=True),
    "updates": Scenario(TOP, every=1),
    "updates-3": Scenario(TOP, every=3),
    "updates-ahead": Scenario(TOP, every=1, step_ahead="auto"),
    "updates-sharded": Scenario(SHARDED, every=3),
    "updates-machines": Scenario(TOP, machines=True, every=1),
}


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_agree_or_stop(name: str, seed: int) -> None:
    Schedule(SCENARIOS[name], seed).play()
