"""What is played: scenarios by name, and the command that plays one seed again."""

from __future__ import annotations

from collections.abc import Sequence

from .ranks import Scenario
from .schedule import KINDS, Schedule
from .world import Violation

TOP = "Scheme(TopK(0.1), dense_below=16)"
SHARDED = "Scheme(TopK(0.1), collective=Sharded(), dense_below=16)"
UNION = "Scheme(UnionTopK(0.1), dense_below=16)"

SCENARIOS = {
    "all-gather": Scenario(TOP),
    "unused": Scenario(TOP, skips_unused=True),
    "skip": Scenario(TOP, skips=True),
    "sharded": Scenario(SHARDED),
    "all-reduce": Scenario("Scheme(RandomK(0.1), dense_below=16)"),
    "union": Scenario(UNION),
    "leader": Scenario("Scheme(LeaderTopK(0.1), dense_below=16)"),
    "machines": Scenario(TOP, machines=True),
    "machines-sharded": Scenario(SHARDED, machines=True),
    "machines-union": Scenario(UNION, machines=True),
    "functional": Scenario(TOP, functional=True),
    "updates": Scenario(TOP, every=1),
    "updates-3": Scenario(TOP, every=3),
    "updates-ahead": Scenario(TOP, every=1, step_ahead="auto"),
    "updates-sharded": Scenario(SHARDED, every=3),
    "updates-machines": Scenario(TOP, machines=True, every=1),
    "updates-delayed": Scenario(TOP, every=2, delay=1),
    "machines-delayed": Scenario(SHARDED, machines=True, every=1, delay=1),
}


def play(name: str, seed: int, kinds: Sequence[str] = KINDS) -> Schedule:
    """Play one schedule. A violation says how to play it again."""
    schedule = Schedule(SCENARIOS[name], seed, kinds)
    try:
        schedule.play()
    except Violation as violation:
        only = "" if kinds is KINDS else f" --kinds {' '.join(kinds)}"
        again = f"python -m tests.simulation {name} {seed}{only}"
        raise Violation(f"{violation}\nto play it again: {again}") from violation
    return schedule
