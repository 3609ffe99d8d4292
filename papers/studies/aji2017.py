"""Aji and Heafield 2017: gradient dropping, with sparse traffic in both directions.

Part two: MNIST, 3 × 4096 hidden units, AdaGrad 0.005, batches of 40 on each of 4 workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from ..recipe import Cell, Place, Recipe, Study

SCOPES = {"local": "layer", "global": "global"}
DROPPED = {"90": "0.1", "99": "0.01", "99.9": "0.001"}  # per cent dropped: ratio sent
MODELS = {"plain": False, "layernorm": True}
PULLS = {"pull-dense": "Sharded(pull_ratio=1.0)", "pull-sparse": "Sharded()"}
DENSE = "0 % dropped"


def short() -> Sequence[Cell]:
    """Return the recipe with a fifth of the paper's epochs: 1,500 steps."""
    return _cells(_recipe(epochs=4))


def paper() -> Sequence[Cell]:
    """Return the recipe with as many epochs as in the paper."""
    return _cells(_recipe(epochs=20))


def quick() -> Sequence[Cell]:
    """Return a recipe with small layers and a tenth of the images, to check that it runs."""
    return _cells(replace(_recipe(epochs=2), hidden=(256, 256, 256), limit=6000))


def _recipe(epochs: int) -> Recipe:
    return Recipe(
        problem="mnist",
        workers=4,
        batch=40,
        epochs=epochs,
        optimizer="adagrad",
        rate=0.005,
        precision="tf32",
        looks=3,
        hidden=(4096, 4096, 4096),
    )


def _cells(recipe: Recipe) -> list[Cell]:
    cells = []
    for model, normalised in MODELS.items():
        trained = replace(recipe, normalised=normalised)
        everywhere = tuple((DENSE, f"{model}, {pull}") for pull in PULLS)
        cells.append(Cell(f"0/{model}", "Scheme(Dense())", trained, everywhere))
        for dropped, ratio in DROPPED.items():
            for scope, cut in SCOPES.items():
                for pull, collective in PULLS.items():
                    cut_text = "" if cut == "layer" else f", scope={cut!r}"
                    cells.append(
                        Cell(
                            f"{dropped}/{scope}/{model}/{pull}",
                            f"Scheme(Threshold({ratio}), collective={collective}{cut_text})",
                            trained,
                            ((f"{dropped} % dropped, {scope}", f"{model}, {pull}"),),
                        )
                    )
    return cells


def remarks(found: Mapping[Place, Sequence[float]]) -> list[str]:
    """Compare every way to drop with dense training of the same model."""
    said = []
    for (row, column), accuracies in found.items():
        dense = found.get((DENSE, column))
        if row == DENSE or not dense:
            continue
        behind = fmean(dense) - fmean(accuracies)
        spread = max(_spread(dense), _spread(accuracies))
        if behind <= max(spread, 0.1):
            verdict = "no loss that the seeds could tell"
        else:
            verdict = f"{behind:.2f} points behind dense"
        said.append(f"{row}, {column}: {verdict}")
    return said


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


MNIST = Study(
    name="aji2017-mnist",
    paper="aji2017",
    claim="on MNIST dropping 90 to 99.9 % of the gradient, in both directions, loses no accuracy",
    recipes={"short": short, "paper": paper, "quick": quick},
    seeds={"short": (0, 1, 2), "paper": (0, 1, 2), "quick": (0,)},
    remarks=remarks,
)
