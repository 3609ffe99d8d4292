"""What a measurement of steps says, in sentences: headlines, and what else there is to say."""

from __future__ import annotations

from ..results import Results, Run
from ..timing import conclusion, ties
from ..words import say_seconds


def headlines(results: Results) -> list[str]:
    """Return the main finding on each network, in one sentence."""
    return [_headline(run) for run in results.runs]


def _headline(run: Run) -> str:
    where = f"On {run.hosts} hosts {run.place}"
    if not run.schemes:
        return f"{where}, no scheme was measured."
    if run.dense is not None:
        return f"{where}, {comparison(run)}."
    best, *others = run.schemes
    took, times = say_seconds(best.median), best.median / run.floor.median
    tied = ties(best.timing, {one.name: one.timing for one in others})
    return f"{where}, a step takes {took} with {best.name}, {times:.2f}× compute alone{tied}."


def comparison(run: Run) -> str:
    """Compare the fastest scheme with dense DDP, both of which took part."""
    (best, *others), dense = run.schemes, run.dense
    assert dense is not None
    fast, slow = say_seconds(best.median, dense.median), say_seconds(dense.median, best.median)
    found = conclusion(best.timing, dense.timing, {one.name: one.timing for one in others})
    return f"a step takes {fast} with {best.name}, {slow} with dense DDP: {found}"


def remarks(run: Run) -> list[str]:
    """Return everything else worth knowing about a network, whoever it speaks for."""
    said = []
    if run.schemes:
        best, dense = run.schemes[0], run.dense
        for one in sorted(run.peers, key=lambda one: one.median):
            times = f"{say_seconds(one.median)} against {say_seconds(best.median)}"
            if one.timing.beats(best.timing):
                said.append(f"{one.name} is faster than {best.name}: {times}.")
            elif not best.timing.beats(one.timing):
                said.append(f"{one.name} cannot be told apart from {best.name}: {times}.")
        slower = [one.name for one in run.schemes if dense and dense.timing.beats(one.timing)]
        if slower:
            said.append(f"Slower than dense DDP: {', '.join(slower)}.")
        said.append(
            f"Compute alone takes {say_seconds(run.floor.median)}; {best.name} takes "
            f"{best.median / run.floor.median:.2f} times that."
        )
    said += [f"{one.name} failed: {one.failed}" for one in run.failed]
    return said + slow_links(run)


def slow_links(run: Run) -> list[str]:
    """Return a sentence for each link that is off its rate."""
    return [
        f"The link of {link.name} is more than 10 % off its rate."
        for link in run.links
        if not link.fits
    ]
