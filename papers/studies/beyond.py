"""Beyond both papers: selectors whose values can be all-reduced, momentum correction, and 0.1 %.

ResNet-18 on CIFAR-10 with 8 workers, as in the short recipe of Table 1, at the same four learning
rates for every scheme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ..recipe import Cell, Place, Study
from .eghlidi2020 import LAPTOP, brief, corrected, recipe_of

DENSE = "Standard SGD"
RATES = (0.003, 0.01, 0.03, 0.1)
_CORRECTED = "memory=MomentumCorrection()"
_GLOBAL = "scope='global'"
_EPOCH = 390  # steps of a dense start: one epoch


@dataclass(frozen=True)
class Row:
    """A row of the table: a selector and the rest of the scheme's text.

    Texts are the same as for Table 1, so that results are shared. If the memory has momentum, the
    optimizer has none. The first `dense` steps send everything.
    """

    heading: str
    name: str
    selector: str
    more: tuple[str, ...] = ()
    dense: int = 0

    @property
    def scheme(self) -> str:
        text = f"Scheme({', '.join((self.selector, *self.more))})"
        return f"Warmup({text}, steps={self.dense})" if self.dense else text

    @property
    def is_corrected(self) -> bool:
        return _CORRECTED in self.more


def _ways(heading: str, name: str, selector: str, *more: str) -> tuple[Row, ...]:
    """Return a scheme's variants: layer-wise, momentum correction, a dense epoch, global."""
    plain = Row(heading, name, selector, more)
    better = Row(f"{heading}, corrected", f"{name}-corrected", selector, (_CORRECTED, *more))
    return (
        plain,
        better,
        replace(
            better,
            heading=f"{better.heading}, dense start",
            name=f"{better.name}-warm",
            dense=_EPOCH,
        ),
        replace(
            better,
            heading=f"{better.heading}, global",
            name=f"{better.name}-global",
            more=(*better.more, _GLOBAL),
        ),
    )


TOP = _ways("Top-k, 1 %", "top-k", "TopK(0.01)")
SHARDED = _ways("Top-k, 1 %, sharded", "sharded", "TopK(0.01)", "collective=Sharded()")
BLOCK = _ways("Top block, 1 %", "top-block", "TopBlock(0.01)")
LEADER = _ways("Leader top-k, 1 %", "leader-top-k", "LeaderTopK(0.01)")
UNION = _ways("Union of top-k, 1 %", "union-top-k", "UnionTopK(0.01)")
# with 8 workers, no more bytes than top-k at 1 % with all-gather
MORE = _ways("Union of top-k, 5 %", "union-5", "UnionTopK(0.05)")[:2]
RANDOM = Row("Random-k, allReduce, 1 %", "random-k", "RandomK(0.01)")
RUNS = Row("Block-random-k, allReduce, 1 %", "block-random-k", "BlockRandomK(0.01, shared=True)")
FEW = _ways("Top-k, 0.1 %", "few", "TopK(0.001)")
ROWS = (
    Row(DENSE, "standard", "Dense()"),
    *TOP,
    Row("Top-k, 1 %, global", "top-k-global", "TopK(0.01)", (_GLOBAL,)),
    *SHARDED,
    *BLOCK,
    *LEADER,
    *UNION,
    *MORE,
    RANDOM,
    RUNS,
    *FEW,
)
ADDED = (*BLOCK, *LEADER, *UNION, RANDOM)
# Goals: the best of some rows is at most this many points behind another row. A negative number
# means at least this many points ahead of it.
GOALS = (
    ("top-k at 1 %", TOP, DENSE, 0.2),
    ("an all-reduce at 1 %", ADDED, DENSE, 0.7),
    ("an all-reduce at 1 %", ADDED, RUNS.heading, -5.0),
    ("an all-reduce at 5 %", MORE, DENSE, 0.7),
    ("owners at 1 %", SHARDED, DENSE, 0.7),
    ("top-k at 0.1 %", FEW[1:], DENSE, 0.7),
)


def short() -> list[Cell]:
    """Return the recipe of 30 epochs, 11,700 steps."""
    return _cells(30)


def laptop() -> list[Cell]:
    """Return the recipe of the small ResNet, with the steps of Table 1's laptop recipe."""
    return _cells(LAPTOP, is_small=True)


def quick() -> list[Cell]:
    """Return a recipe of two steps with 32 images at one rate, to check that everything runs."""
    return [replace(cell, recipe=brief(cell.recipe)) for cell in _cells(1, 2, (0.03,))]


def _cells(
    epochs: int, workers: int = 8, rates: Sequence[float] = RATES, is_small: bool = False
) -> list[Cell]:
    cells = []
    for row in ROWS:
        for rate in rates:
            recipe = recipe_of(workers, epochs, rate, is_small)
            recipe = corrected(recipe) if row.is_corrected else recipe
            place = (row.heading, f"rate {rate}")
            cells.append(Cell(f"{row.name}/{rate}", row.scheme, recipe, (place,)))
    return cells


def remarks(found: Mapping[Place, Sequence[float]]) -> list[str]:
    """Check every goal, with every row at its best rate."""
    best: dict[str, tuple[float, str]] = {}
    for (row, rate), accuracies in found.items():
        best[row] = max(best.get(row, (0.0, "")), (fmean(accuracies), rate))
    said = []
    for name, rows, other, bound in GOALS:
        tried = [row.heading for row in rows if row.heading in best]
        if not tried or other not in best:
            said.append(f"{name} against {other}: not tested yet")
            continue
        row = max(tried, key=lambda row: best[row])
        behind = best[other][0] - best[row][0]
        side = f"{behind:.2f} points behind" if behind >= 0 else f"{-behind:.2f} points before"
        goal = f"at most {bound} behind" if bound >= 0 else f"at least {-bound:g} before"
        verdict = "reached" if behind <= bound else "not reached"
        ours, theirs = (f"{each} ({best[each][1]})" for each in (row, other))
        said.append(f"{name}: {ours} is {side} {theirs}; {goal}: {verdict}")
    return said


BEYOND = Study(
    name="beyond-cifar10",
    paper="eghlidi2020",
    claim="1 % that can be added up on the way, or 0.1 %, as good as dense",
    recipes={"short": short, "laptop": laptop, "quick": quick},
    seeds={"short": (0, 1), "laptop": (0,), "quick": (0,)},
    remarks=remarks,
)
