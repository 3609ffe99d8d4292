"""Steps are timed part by part, once they are alike."""

from __future__ import annotations

import pytest
import torch

from papers import clock
from papers.clock import FIRST, MANY, Clock


@pytest.mark.parametrize("warmup", [0, 25])
def test_shares_add_up(monkeypatch: pytest.MonkeyPatch, warmup: int) -> None:
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    watch, first = Clock(torch.device("cpu"), warmup), warmup + FIRST
    for step in range(first + MANY + 10):
        watch.begin(step)
        is_alike = first <= step < first + MANY
        for seconds in (3.0, 1.0) if is_alike else (0.0, 50.0):
            now[0] += seconds
            watch.mark()
    assert watch.shares() == [0.75, 0.25]


def test_too_few_steps_say_nothing() -> None:
    watch = Clock(torch.device("cpu"))
    for step in range(FIRST):
        watch.begin(step)
        watch.mark()
    assert watch.shares() == []
