"""The plan of a measurement, decided and checked before any process starts; plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Turn = tuple[int, str]  # the round and the contender


@dataclass(frozen=True)
class Plan:
    """One measurement on one network, the same for every rank.

    Args:
        model: the workload's name.
        batch_size: examples per rank and step; None for the model's own.
        turns: rounds and contenders, in order.
        steps: how many steps a turn measures at most.
        timeout: seconds after which a step counts as hung.
        counts: the number of steps per contender, where it is decided already.
    """

    model: str
    batch_size: int | None
    turns: tuple[Turn, ...]
    steps: int
    timeout: float
    counts: dict[str, int]


def interleave(contenders: Sequence[str], rounds: int) -> tuple[Turn, ...]:
    """Return the turns of all contenders in every round; every other round is reversed.

    A machine that slows down during the measurement then affects all contenders alike.

    >>> interleave(["a", "b"], 2)
    ((0, 'a'), (0, 'b'), (1, 'b'), (1, 'a'))
    """
    return tuple(
        (number, name)
        for number in range(rounds)
        for name in (reversed(contenders) if number % 2 else contenders)
    )
