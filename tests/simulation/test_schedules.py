"""Thousands of schedules. A failing one tells its story, and the command that plays it again.

A longer run, with other seeds: make fuzz
"""

from __future__ import annotations

import pytest

from .scenarios import SCENARIOS, play

SEEDS = 112  # for each scenario


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_agree_or_stop(name: str) -> None:
    for seed in range(SEEDS):
        play(name, seed)


def test_a_schedule_replays_as_it_was() -> None:
    for seed in (3, 12, 17):
        stories = [play("machines", seed).story for _ in range(2)]
        assert stories[0] == stories[1]
