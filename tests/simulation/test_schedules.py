"""Thousands of schedules. A failing one tells its story, and the command that plays it again.

A longer run, with other seeds: make fuzz
"""

from __future__ import annotations

import pytest
import torch

from .scenarios import SCENARIOS, play

SEEDS = 40  # for each scenario


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    """Small tensors: torch's threads would only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_agree_or_stop(name: str) -> None:
    for seed in range(SEEDS):
        play(name, seed)


def test_a_schedule_replays_as_it_was() -> None:
    for seed in (3, 12, 17):
        stories = [play("machines", seed).story for _ in range(2)]
        assert stories[0] == stories[1]
