"""Beyond both papers: selections as good as top-k that an all-reduce can carry, and 0.1 %.

ResNet-18 on CIFAR-10 with 8 workers, as the short recipe of Table 1 has it, at three learning rates
for every scheme alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from .eghlidi2020 import recipe_of
from .recipe import Cell, Place, Study

DENSE = "Standard SGD"
RATES = (0.01, 0.03, 0.1)
_TOP, _BLOCK, _LEADER = "Top-k, 1 %", "Top block, 1 %", "Leader top-k, 1 %"
_RANDOM = "Block-random-k, allReduce, 1 %"
_FEW = "Top-k, 0.1 %"
_CORRECTED = ", momentum correction"
_WARM = ", dense for an epoch"
# by row: the word in the cell's name, and the scheme, written as in Table 1 to share its results
SCHEMES = {
    DENSE: ("standard", "Scheme(Dense())"),
    _TOP: ("top-k", "Scheme(TopK(0.01))"),
    _TOP + _CORRECTED: ("top-k-corrected", "Scheme(TopK(0.01), memory=MomentumCorrection())"),
    _BLOCK: ("top-block", "Scheme(TopBlock(0.01))"),
    _LEADER: ("leader-top-k", "Scheme(LeaderTopK(0.01))"),
    _BLOCK + _CORRECTED: (
        "top-block-corrected",
        "Scheme(TopBlock(0.01), memory=MomentumCorrection())",
    ),
    _LEADER + _CORRECTED: (
        "leader-top-k-corrected",
        "Scheme(LeaderTopK(0.01), memory=MomentumCorrection())",
    ),
    _RANDOM: ("block-random-k", "Scheme(BlockRandomK(0.01, shared=True))"),
    _FEW: ("few", "Scheme(TopK(0.001))"),
    _FEW + _CORRECTED: ("few-corrected", "Scheme(TopK(0.001), memory=MomentumCorrection())"),
    _FEW + _CORRECTED + _WARM: (
        "few-corrected-warm",
        "Warmup(Scheme(TopK(0.001), memory=MomentumCorrection()), steps=390)",
    ),
}
# what is asked of them: rows, of which the best counts; at most so many points behind a row, or so
# many before it
GOALS = (
    ("top-k at 1 %", (_TOP, _TOP + _CORRECTED), DENSE, 0.2),
    ("an all-reduce at 1 %", (_BLOCK, _LEADER), DENSE, 0.7),
    ("an all-reduce at 1 %", (_BLOCK, _LEADER), _RANDOM, -5.0),
    ("top-k at 0.1 %", (_FEW + _CORRECTED, _FEW + _CORRECTED + _WARM), DENSE, 0.7),
)


def short() -> list[Cell]:
    """30 epochs, 11,700 steps."""
    return _cells(30)


def quick() -> list[Cell]:
    """Two steps on as few images: to see that everything runs."""
    return [
        replace(cell, recipe=replace(cell.recipe, limit=256, drops=(), workers=2, batch=64))
        for cell in _cells(1)
    ]


def _cells(epochs: int) -> list[Cell]:
    cells = []
    for row, (name, scheme) in SCHEMES.items():
        for rate in RATES:
            recipe = recipe_of(8, epochs, rate)
            if _CORRECTED in row:
                recipe = replace(recipe, momentum=0.0)
            place = (row, f"rate {rate}")
            cells.append(Cell(f"{name}/{rate}", scheme, recipe, (place,)))
    return cells


def remarks(found: Mapping[Place, Sequence[float]]) -> list[str]:
    """Every goal, with every row at its best rate."""
    best: dict[str, tuple[float, str]] = {}
    for (row, rate), accuracies in found.items():
        best[row] = max(best.get(row, (0.0, "")), (fmean(accuracies), rate))
    said = []
    for name, rows, other, bound in GOALS:
        tried = [row for row in rows if row in best]
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
    claim="coordinates that ranks agree on are as good as top-k and can be added up on the way",
    recipes={"short": short, "quick": quick},
    seeds={"short": (0, 1), "quick": (0,)},
    remarks=remarks,
)
