"""When two measured times differ, and what is said when they do not."""

from __future__ import annotations

import pytest

from sparsewire.tools.bench.timing import Timing, conclusion, ties

DENSE = Timing(2.0, 1.9, 2.1)


def test_the_spread_is_the_quartiles_and_of_few_the_whole_range() -> None:
    assert Timing.of([1.0, 2.0, 3.0, 4.0, 90.0]) == Timing(3.0, 2.0, 4.0)
    assert Timing.of([1.0, 2.0, 9.0]) == Timing(2.0, 1.0, 9.0)
    assert Timing.of([1.0]) == Timing(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        (Timing(4.0, 3.0, 5.0), "2.0× faster"),
        (Timing(1.0, 0.9, 1.1), "2.0× slower"),
        (Timing(2.12, 2.1001, 2.2), "1.1× faster"),
        (Timing(4.0, 2.1, 5.0), "unclear"),  # the spreads touch
        (Timing(1.0, 0.1, 1.9), "unclear"),
        (Timing(2.08, 2.1001, 2.2), "unclear"),  # they do not, but the times look the same
        (Timing(1.92, 1.8, 1.8999), "unclear"),
        (DENSE, "unclear"),
    ],
)
def test_a_difference_needs_spreads_that_do_not_overlap(other: Timing, verdict: str) -> None:
    assert DENSE.verdict(other) == verdict
    assert (DENSE.gain_over(other) is None) is (verdict == "unclear")
    assert DENSE.beats(other) is verdict.endswith("faster")
    opposite = {"faster": "slower", "slower": "faster"}
    word = verdict.split()[-1]
    assert other.verdict(DENSE) == verdict.replace(word, opposite.get(word, word))


def test_who_is_as_fast_as_the_best_is_named() -> None:
    best, close, far = Timing(1.0, 0.9, 1.1), Timing(1.2, 1.0, 1.4), Timing(1.9, 1.8, 2.0)
    assert ties(best, {}) == ties(best, {"c": far}) == ""
    assert ties(best, {"a": close, "c": far}) == "; a cannot be told apart from the fastest"
    assert ties(best, {"a": close, "b": close, "c": close}).startswith("; a, b and c cannot")
    assert (
        conclusion(best, DENSE, {"a": close})
        == "2.0× faster; a cannot be told apart from the fastest"
    )
    assert conclusion(far, DENSE, {"a": far}) == "they cannot be told apart in this run"
