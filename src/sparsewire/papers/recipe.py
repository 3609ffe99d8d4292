"""What a study consists of: recipes, cells and where they stand in the table.

A recipe is a frozen choice of everything but the scheme and the seed; functions return them. A cell
is one training, named by words with slashes between: `top-k/layer/8`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

Place = tuple[str, str]
"""A row and a column of a study's table."""


@dataclass(frozen=True)
class Recipe:
    """How a model is trained; the scheme is the cell's own.

    Arguments:
        problem: what is learnt, 'mnist' or 'cifar10'.
        workers: how many take part; all of them hold the same weights.
        batch: examples per worker and step.
        epochs: passes over the training set; what does not fill a step is left out.
        optimizer: applies the mean, with momentum and weight decay: both come after the exchange.
        rate: the learning rate.
        drops: epochs after which the rate is divided by ten. What workers keep back is multiplied
            by ten then, which equals a memory of updates (γ inside), as Eghlidi and Jaggi have it.
        precision: of matrix products: 'float32', 'tf32', or 'bfloat16' by autocast. Gradients,
            exchange and weights are float32 whatever this is.
        looks: how often in an epoch the test set is looked at.
        hidden: widths of the perceptron's layers.
        normalised: the perceptron has layer normalisation.
        limit: train and test on the first so many examples only.
    """

    problem: Literal["mnist", "cifar10"]
    workers: int
    batch: int
    epochs: int
    optimizer: Literal["sgd", "adagrad"]
    rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    drops: tuple[int, ...] = ()
    precision: Literal["float32", "tf32", "bfloat16"] = "tf32"
    looks: int = 1
    hidden: tuple[int, ...] = ()
    normalised: bool = False
    limit: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    def rate_at(self, epoch: int) -> float:
        """The learning rate of an epoch, counted from 0."""
        return self.rate * 0.1 ** sum(epoch >= drop for drop in self.drops)


@dataclass(frozen=True)
class Cell:
    """One training, and where its result stands; `published` is the paper's own, in per cent."""

    name: str
    scheme: str
    recipe: Recipe
    places: tuple[Place, ...]
    published: tuple[float | None, ...] = ()

    def is_meant(self, pattern: str) -> bool:
        """Whether `pattern`, as of file names, fits the name, or is one of its words.

        >>> cell = Cell("top-k/layer/8", "TopK(0.01)", Recipe("mnist", 8, 16, 1, "sgd", 0.1), ())
        >>> cell.is_meant("top-k"), cell.is_meant("top-k/*/8"), cell.is_meant("top")
        (True, True, False)
        """
        return fnmatchcase(self.name, pattern) or pattern in self.name.split("/")


@dataclass(frozen=True)
class Study:
    """A claim of a paper, and the trainings that test it.

    Arguments:
        name: what `sparsewire reproduce` calls it.
        paper: the folder under papers/.
        claim: what is to be found out.
        recipes: for every name of a recipe, a function that returns the cells.
        seeds: those taken if nobody names others, by recipe.
        remarks: what follows from the accuracies (in per cent, by place and seed), in sentences.
    """

    name: str
    paper: str
    claim: str
    recipes: Mapping[str, Callable[[], Sequence[Cell]]]
    seeds: Mapping[str, tuple[int, ...]]
    remarks: Callable[[Mapping[Place, Sequence[float]]], Sequence[str]]

    @property
    def usual(self) -> str:
        """The recipe taken if nobody names another."""
        return next(iter(self.recipes))
