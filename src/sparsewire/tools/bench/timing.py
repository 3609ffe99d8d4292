"""A measured time with its spread, and the one rule for when two of them differ.

Headlines, tables and pictures claim a difference only where this rule finds one.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CLEAR = 1.05  # times closer than this look the same, however narrow their spreads are
RULE = (
    "Two times count as different only if their spreads do not overlap and "
    "they are at least 5 % apart. Otherwise the difference is called unclear."
)


@dataclass(frozen=True)
class Timing:
    """Seconds that something took, and the range from `low` to `high` that they spread over."""

    seconds: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """The median of several measurements, and their quartiles; the whole range of fewer than
        four.

        >>> Timing.of([1.0, 2.0, 3.0, 4.0, 90.0])
        Timing(seconds=3.0, low=2.0, high=4.0)
        """
        if len(seconds) < 4:
            return cls(statistics.median(seconds), min(seconds), max(seconds))
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(middle, low, high)

    def gain_over(self, other: Timing) -> float | None:
        """Return how many times faster this is than `other`; below 1 if it is slower.

        None if they cannot be told apart: their spreads overlap, or they are within 5 %.
        """
        ratio = other.seconds / self.seconds
        overlap = self.low <= other.high and other.low <= self.high
        return None if overlap or 1 / CLEAR < ratio < CLEAR else ratio

    def beats(self, other: Timing) -> bool:
        """Whether this is measurably faster than `other`."""
        gain = self.gain_over(other)
        return gain is not None and gain > 1

    def verdict(self, other: Timing) -> str:
        """This against `other` in a word or two.

        >>> fast, slow = Timing(1.0, 0.9, 1.1), Timing(2.0, 1.8, 2.2)
        >>> fast.verdict(slow), slow.verdict(fast), fast.verdict(fast)
        ('2.0× faster', '2.0× slower', 'unclear')
        """
        gain = self.gain_over(other)
        if gain is None:
            return "unclear"
        return f"{gain:.1f}× faster" if gain > 1 else f"{1 / gain:.1f}× slower"


def conclusion(best: Timing, dense: Timing, rivals: Mapping[str, Timing]) -> str:
    """The end of a headline that has named the time of the fastest scheme and of dense DDP."""
    if best.gain_over(dense) is None:
        return "they cannot be told apart in this run"
    return best.verdict(dense) + ties(best, rivals)


def ties(best: Timing, rivals: Mapping[str, Timing]) -> str:
    """The end of a headline that has named `best` alone: which rivals may be as fast."""
    names = [name for name, rival in rivals.items() if best.gain_over(rival) is None]
    if not names:
        return ""
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return f"; {listed} cannot be told apart from the fastest"
