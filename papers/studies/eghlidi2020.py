"""Eghlidi and Jaggi 2020: top-k, random-k and block-random-k, layer-wise and global, on CIFAR-10.

ResNet-18, 1 % sent, momentum 0.9 and weight decay 1e-4 after the exchange. One-dimensional tensors
are sent densely; otherwise random selection diverges (`eghlidi2020-divergence`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from ..recipe import Cell, Place, Recipe, Study
from ..store import Store, StoreError, is_doubted, usual_store

STANDARD = "Standard SGD"
SCHEMES = {
    STANDARD: ("standard", "Dense()"),
    "Top-k": ("top-k", "TopK(0.01)"),
    "Random-k, allGather": ("random-k-gather", "RandomK(0.01, shared=False)"),
    "Random-k, allReduce": ("random-k-reduce", "RandomK(0.01)"),
    "Block-random-k, allGather": ("block-random-k-gather", "BlockRandomK(0.01)"),
    "Block-random-k, allReduce": ("block-random-k-reduce", "BlockRandomK(0.01, shared=True)"),
}
SCOPES = ("layer", "global")
WORKERS = (1, 2, 4, 8)
# Test accuracy in per cent from Table 1 of the paper: layer-wise for 1 to 8 workers, then global.
PUBLISHED = {
    STANDARD: (94.50, 94.53, 94.40, 94.30, 94.50, 94.53, 94.40, 94.30),
    "Top-k": (93.63, 93.70, 93.68, 93.41, 91.45, 91.51, 91.75, 91.50),
    "Random-k, allGather": (93.43, 93.30, 93.12, 92.54, 91.73, 91.76, 91.16, 91.45),
    "Random-k, allReduce": (93.43, 93.20, 93.15, 92.43, 91.73, 91.66, 91.26, 91.25),
    "Block-random-k, allGather": (93.16, 93.10, 93.12, 93.10, 91.18, 91.05, 91.11, 90.45),
    "Block-random-k, allReduce": (93.16, 92.50, 90.80, 90.63, 91.18, 88.20, 79.00, 78.11),
}
RATES = (0.01, 0.03, 0.1, 0.3)
LAPTOP = 10  # epochs of the laptop recipes, 3,900 steps
_BATCH = 128  # examples of all workers together in short recipes, of each worker in the paper's


def recipe_of(workers: int, epochs: int, rate: float, is_small: bool = False) -> Recipe:
    """Return a recipe that divides one batch among the workers, so the steps stay the same."""
    return Recipe(
        problem="cifar10",
        workers=workers,
        batch=_BATCH // workers,
        epochs=epochs,
        optimizer="sgd",
        rate=rate,
        momentum=0.9,
        weight_decay=1e-4,
        drops=(epochs // 2, epochs * 5 // 6),
        precision="bfloat16",
        model="resnet10" if is_small else "",
    )


def corrected(recipe: Recipe) -> Recipe:
    """Return the recipe with momentum in the memory instead of the optimizer.

    An optimizer without momentum does not amplify weight decay, which is therefore increased.
    """
    decay = round(recipe.weight_decay / (1 - recipe.momentum), 9)
    return replace(recipe, momentum=0.0, weight_decay=decay)


def _rate(row: str, scope: str) -> float:
    """Return the paper's learning rate for one worker."""
    return 0.01 if scope == "global" and row != STANDARD else 0.1


def paper() -> list[Cell]:
    """Return the paper's recipe: 300 epochs, 128 images per worker, rate 0.1 or 0.01 times W."""

    def made(row: str, scope: str, workers: int) -> Recipe:
        recipe = recipe_of(workers, 300, _rate(row, scope) * workers)
        return replace(recipe, batch=_BATCH)

    return [_cell(*spot, made(*spot)) for spot in _spots(WORKERS)]


def short() -> list[Cell]:
    """Return the recipe with a tenth of the epochs, 128 images for all workers: 11,700 steps."""
    return [_cell(*spot, recipe_of(spot[2], 30, _rate(*spot[:2]))) for spot in _spots(WORKERS)]


def laptop() -> list[Cell]:
    """Return the recipe of a small ResNet, 10 epochs, 3,900 steps: minutes each on one core."""
    return [
        _cell(*spot, recipe_of(spot[2], LAPTOP, _rate(*spot[:2]), is_small=True))
        for spot in _spots(WORKERS)
    ]


def tuned() -> list[Cell]:
    """Return the short recipe with the best rate of `eghlidi2020-rates` for every scheme."""
    best = best_rates(usual_store("eghlidi2020", "eghlidi2020-rates"))
    return [_cell(*spot, recipe_of(spot[2], 30, best[spot[:2]])) for spot in _spots(WORKERS)]


def quick() -> list[Cell]:
    """Return a recipe of two steps with 32 images, tested on 32, to check that everything runs."""
    return [_cell(*spot, brief(recipe_of(spot[2], 1, _rate(*spot[:2])))) for spot in _spots((1, 2))]


def brief(recipe: Recipe) -> Recipe:
    """Shorten a recipe to the least that runs everything once."""
    return replace(recipe, batch=32 // recipe.workers, limit=64, drops=())


def best_rates(store: Store) -> dict[tuple[str, str], float]:
    """Return the rate with the best stored accuracy for every scheme and scope."""
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for (row, scope), rate, cell in _rate_cells():
        results = [r for r in store.find_all(cell) if not (r["diverged"] or is_doubted(r))]
        if results:
            accuracy = fmean(result["test_accuracy"] for result in results)
            best[row, scope] = max(best.get((row, scope), (0.0, rate)), (accuracy, rate))
    missing = {spot[:2] for spot in _spots((8,))} - set(best)
    if missing:
        raise StoreError(
            f"needs `python -m papers eghlidi2020-rates` first: they are not in {store.path}"
        )
    return {place: rate for place, (_, rate) in best.items()}


def _spots(numbers: Sequence[int]) -> Iterator[tuple[str, str, int]]:
    """Return row, scope and workers of every training; standard SGD has no scope."""
    for workers in numbers:
        for row in SCHEMES:
            for scope in SCOPES[:1] if row == STANDARD else SCOPES:
                if not (workers == 1 and row.endswith("allReduce")):
                    yield row, scope, workers


def _cell(row: str, scope: str, workers: int, recipe: Recipe) -> Cell:
    """Return a cell; with one worker, it stands for both all-gather and all-reduce."""
    rows = [row]
    if workers == 1 and row.endswith("allGather"):
        rows.append(row.replace("allGather", "allReduce"))
    places = [
        (name, column(each, workers))
        for name in rows
        for each in (SCOPES if row == STANDARD else [scope])
    ]
    name, _ = SCHEMES[row]
    published = [_published(*place) for place in places]
    words = [name, str(workers)] if row == STANDARD else [name, scope, str(workers)]
    return Cell("/".join(words), _text(row, scope), recipe, tuple(places), tuple(published))


def column(scope: str, workers: int) -> str:
    """Return the heading of the column for a scope and a number of workers."""
    return f"{scope}, W={workers}"


def _published(row: str, heading: str) -> float | None:
    headings = [column(scope, workers) for scope in SCOPES for workers in WORKERS]
    return PUBLISHED[row][headings.index(heading)]


def _text(row: str, scope: str) -> str:
    selector = SCHEMES[row][1]
    return f"Scheme({selector}, scope='global')" if scope == "global" else f"Scheme({selector})"


def _rate_cells(
    epochs: int = 12, is_small: bool = False
) -> Iterator[tuple[tuple[str, str], float, Cell]]:
    for row, scope, workers in _spots((8,)):
        for rate in RATES:
            label = row if row == STANDARD else f"{row}, {scope}"
            name = f"{SCHEMES[row][0]}/{scope}/{rate}"
            recipe = recipe_of(workers, epochs, rate, is_small)
            place = (label, f"rate {rate}")
            yield (row, scope), rate, Cell(name, _text(row, scope), recipe, (place,))


def rates() -> list[Cell]:
    """Return the cells of the rates study: the same four rates for all, 8 workers, 12 epochs."""
    return [cell for _, _, cell in _rate_cells()]


def laptop_rates() -> list[Cell]:
    """Return the same cells for the small ResNet, with the steps of its Table 1."""
    return [cell for _, _, cell in _rate_cells(LAPTOP, is_small=True)]


_WHOLE, _SPARSIFIED = "1-D tensors whole", "1-D tensors sparsified"
_BEFORE = "whole, momentum before the exchange"
_CHANCE = 15.0  # per cent: a model that learns nothing stays below this, with ten classes


def divergence(is_small: bool = False) -> list[Cell]:
    """Return the cells for 1-D tensors and the place of momentum: one worker, 5 epochs."""
    cells = []
    for row in ("Top-k", "Random-k, allGather", "Block-random-k, allGather"):
        name, selector = SCHEMES[row]
        recipe = recipe_of(1, 5, 0.1, is_small)
        for word, heading, scheme, used in (
            ("whole", _WHOLE, f"Scheme({selector})", recipe),
            (
                "sparsified",
                _SPARSIFIED,
                f"Scheme({selector}, dense_below=0, dense_1d=False)",
                recipe,
            ),
            (
                "corrected",
                _BEFORE,
                f"Scheme({selector}, memory=MomentumCorrection())",
                corrected(recipe),
            ),
        ):
            plain = row.partition(",")[0]
            cells.append(Cell(f"{name}/{word}", scheme, used, ((plain, heading),)))
    return cells


def remarks(found: Mapping[Place, Sequence[float]]) -> list[str]:
    """Check the paper's claims about Table 1 pair by pair, and compare every row with dense."""
    means = {place: fmean(values) for place, values in found.items()}
    layer, everywhere = (
        {(row, w): (row, column(scope, w)) for row in SCHEMES for w in WORKERS} for scope in SCOPES
    )
    rows = [row for row in SCHEMES if row != STANDARD]
    headings = [column(scope, w) for scope in SCOPES for w in WORKERS]
    gather, reduce = "Block-random-k, allGather", "Block-random-k, allReduce"
    said = [
        _ordering(
            "layer-wise at least as good as global",
            means,
            [(layer[row, w], everywhere[row, w]) for row in rows for w in WORKERS],
        ),
        _ordering(
            "top-k at least as good as random-k",
            means,
            [(("Top-k", c), (row, c)) for c in headings for row in rows[1:3]],
        ),
        _ordering(
            "random-k at least as good as block-random-k",
            means,
            [((rows[n], c), (rows[n + 2], c)) for c in headings for n in (1, 2)],
        ),
        _ordering(
            "block-random-k: all-gather at least as good as all-reduce",
            means,
            [((gather, c), (reduce, c)) for c in headings if not c.endswith("W=1")],
        ),
        _growth("block-random-k: what all-reduce loses grows with the workers", means),
    ]
    for row in rows:
        gaps = [
            (means[STANDARD, c] - means[row, c], PUBLISHED[STANDARD][n] - PUBLISHED[row][n])
            for n, c in enumerate(headings)
            if (row, c) in means and (STANDARD, c) in means
        ]
        if gaps:
            ours, theirs = (fmean(side) for side in zip(*gaps, strict=True))
            verdict = "reproduced" if abs(ours - theirs) <= 1 else "not reproduced"
            said.append(
                f"{row}: {ours:.2f} points behind standard SGD, {theirs:.2f} in the paper, on "
                f"average over {len(gaps)} of the columns: {verdict} (to within a point)"
            )
    return said


def _ordering(
    claim: str, means: Mapping[Place, float], pairs: Sequence[tuple[Place, Place]]
) -> str:
    known = [(one, other) for one, other in pairs if one in means and other in means]
    if not known:
        return f"{claim}: not tested yet"
    failing = [one[1] for one, other in known if means[one] < means[other]]
    text = f"{claim}: holds in {len(known) - len(failing)} of {len(known)} pairs"
    return f"{text} (not for {'; '.join(dict.fromkeys(failing))})" if failing else text


def _growth(claim: str, means: Mapping[Place, float]) -> str:
    """Return how the advantage of all-gather for blocks changes with the number of workers."""
    said = []
    for scope in SCOPES:
        gaps = [
            means["Block-random-k, allGather", column(scope, w)]
            - means["Block-random-k, allReduce", column(scope, w)]
            for w in WORKERS[1:]
            if {(f"Block-random-k, {way}", column(scope, w)) for way in ("allGather", "allReduce")}
            <= set(means)
        ]
        if len(gaps) > 1:
            verdict = "holds" if gaps == sorted(gaps) else "does not hold"
            said.append(f"{scope} {verdict} ({', '.join(f'{gap:.2f}' for gap in gaps)} points)")
    return f"{claim}: {'; '.join(said) or 'not tested yet'}"


def _best(found: Mapping[Place, Sequence[float]]) -> list[str]:
    """Return the best rate of every row."""
    rows = dict.fromkeys(row for row, _ in found)
    said = []
    for row in rows:
        means = {heading: fmean(values) for (r, heading), values in found.items() if r == row}
        heading = max(means, key=lambda name: means[name])
        said.append(f"{row}: best at {heading}, {means[heading]:.2f} %")
    return said


def _placement(found: Mapping[Place, Sequence[float]]) -> list[str]:
    """Return the effects of sparsified 1-D tensors and of early momentum on every row."""
    means = {place: fmean(values) for place, values in found.items()}
    said = []
    for row in dict.fromkeys(row for row, _ in found):
        whole, sparsified, before = (
            means.get((row, heading)) for heading in (_WHOLE, _SPARSIFIED, _BEFORE)
        )
        if whole is None:
            continue
        if sparsified is not None:
            change = f"{sparsified - whole:+.2f} points"
            verdict = "learns nothing" if sparsified < _CHANCE else change
            said.append(f"{row}, 1-D tensors sparsified too: {verdict}")
        if before is not None:
            said.append(f"{row}, momentum before the exchange: {before - whole:+.2f} points")
    return said


ALL = (
    Study(
        name="eghlidi2020-table1",
        paper="eghlidi2020",
        claim="layer-wise beats global, top-k beats random, all-gather beats all-reduce for blocks",
        recipes={
            "short": short,
            "paper": paper,
            "tuned": tuned,
            "laptop": laptop,
            "quick": quick,
        },
        seeds={"short": (0, 1), "paper": (0,), "tuned": (0, 1), "laptop": (0, 1, 2), "quick": (0,)},
        remarks=remarks,
    ),
    Study(
        name="eghlidi2020-rates",
        paper="eghlidi2020",
        claim="one small grid of learning rates, the same for every scheme",
        recipes={"short": rates, "laptop": laptop_rates},
        seeds={"short": (0,), "laptop": (0,)},
        remarks=_best,
    ),
    Study(
        name="eghlidi2020-divergence",
        paper="eghlidi2020",
        claim="random selection diverges if normalisation weights are sparsified too",
        recipes={"short": divergence, "laptop": partial(divergence, is_small=True)},
        seeds={"short": (0,), "laptop": (0,)},
        remarks=_placement,
    ),
)
