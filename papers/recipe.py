"""The parts of a study: recipes, cells and their places in the table.

A recipe is a frozen choice of everything except the scheme and the seed. A cell is one training
with a name such as `top-k/layer/8`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from statistics import fmean, stdev
from typing import Any, Literal

Place = tuple[str, str]
"""A row and a column of a study's table."""

# Fields that were added after the first results. `to_dict` leaves out their default values, so that
# older results still count.
_LATER = (
    "model",
    "vocabulary",
    "length",
    "warmup",
    "cosine",
    "communicate",
    "every",
    "delay",
    "step_ahead",
    "outer_rate",
    "outer_momentum",
    "decays_apart",
    "share_moments",
    "share_residuals",
    "flush",
    "drift",
)


@dataclass(frozen=True)
class Recipe:
    """The training of a model, without the scheme and the seed.

    Arguments:
        problem: The task: 'mnist', 'cifar10', the corpus to translate, or the text for a
            character-level language model.
        workers: The number of workers.
        batch: The number of examples per worker and step.
        epochs: The number of passes over the training set. An incomplete last step is dropped.
        optimizer: The optimizer, with its momentum and weight decay. With gradients, it applies
            their mean after the exchange.
        rate: The learning rate.
        drops: The epochs after which the rate is divided by ten. Residuals are then multiplied by
            ten, which equals a memory of updates (γ inside), as in Eghlidi and Jaggi. Not together
            with `warmup`.
        precision: The precision of matrix products: 'float32', 'tf32', or 'bfloat16' by autocast.
            Gradients, exchange and weights are always float32.
        looks: The number of evaluations per epoch.
        hidden: The widths of the perceptron's layers, or of a translator's on each side.
        normalised: If True, the perceptron or translator has layer normalisation.
        limit: The number of examples to train and test on. If None, all of them.
        model: The model: 'rnn' or 'transformer' for translation, 'gpt' for characters. For
            CIFAR-10, 'resnet10' is small enough for two cores; the default is ResNet-18.
        vocabulary: The largest number of subwords of both languages together.
        length: The largest number of subwords in a sentence, with its end.
        warmup: The number of steps over which the rate rises to `rate`. Then it falls with the
            square root of the step, as in Vaswani et al., and residuals are not rescaled. With 0
            the rate is constant.
        cosine: If True, the rate falls along a cosine after the warm-up, to a tenth.
        decays_apart: If True, apply decoupled weight decay exactly to the shared weights and not
            through the exchange. It needs updates after every step.
        share_moments: The number of steps between two averages of second moments. 0 means never.
        share_residuals: The number of steps between two averages of residuals. 0 means never.
        flush: With updates, apply the mean residual before the learning rate falls by half or more.
        drift: With updates, also begin rounds ahead of the shared weights, by this many steps of
            their recent motion.
    """

    problem: Literal["mnist", "cifar10", "multi30k", "tatoeba-en-ro", "shakespeare"]
    workers: int
    batch: int
    epochs: int
    optimizer: Literal["sgd", "adagrad", "adam", "adamw"]
    rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    drops: tuple[int, ...] = ()
    precision: Literal["float32", "tf32", "bfloat16"] = "tf32"
    looks: int = 1
    hidden: tuple[int, ...] = ()
    normalised: bool = False
    limit: int | None = None
    model: Literal["", "rnn", "transformer", "resnet10", "gpt"] = ""
    vocabulary: int = 0
    length: int = 0
    warmup: int = 0
    cosine: bool = False
    communicate: Literal["gradients", "updates"] = "gradients"
    every: int = 1
    delay: Literal[0, 1] = 0
    step_ahead: float | Literal["auto"] = 0.0
    outer_rate: float = 0.0
    outer_momentum: float = 0.0
    decays_apart: bool = False
    share_moments: int = 0
    share_residuals: int = 0
    flush: bool = False
    drift: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup and self.drops:
            raise ValueError("a recipe has either drops or a warmup, not both")
        if self.cosine and not self.warmup:
            raise ValueError("a cosine needs a warmup of at least one step")

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as values for JSON."""
        usual = {field.name: field.default for field in fields(self) if field.name in _LATER}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if name not in usual or value != usual[name]
        }

    def rate_at(self, step: int, per_epoch: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if not self.warmup:
            return self.rate * 0.1 ** sum(step // per_epoch >= drop for drop in self.drops)
        share = (step + 1) / self.warmup
        if not self.cosine:
            return self.rate * min(share, 1 / math.sqrt(share))
        if share < 1:
            return self.rate * share
        passed = (step - self.warmup) / max(1, per_epoch * self.epochs - self.warmup)
        return self.rate * (0.55 + 0.45 * math.cos(math.pi * passed))


@dataclass(frozen=True)
class Measure:
    """A measured quantity: its field in a result, its name, and its unit."""

    field: str
    name: str
    unit: float = 1.0
    is_loss: bool = False  # lower is better
    digits: int = 2

    def mean(self, numbers: Sequence[float], sign: str = "") -> str:
        """Return a mean, with its standard error if there are several numbers, and their count.

        >>> LOSS.mean([1.0, 3.0]), ACCURACY.mean([0.5], sign="+")
        ('2.00 ± 1.00 (2)', '+0.50 (1)')
        """
        text = f"{fmean(numbers):{sign}.{self.digits}f}"
        if len(numbers) > 1:
            text += f" ± {stdev(numbers) / math.sqrt(len(numbers)):.{self.digits}f}"
        return f"{text} ({len(numbers)})"


ACCURACY = Measure("test_accuracy", "test accuracy, %", 100.0)
LOSS = Measure("loss", "training loss")


@dataclass(frozen=True)
class Cell:
    """One training, its places in the table, and the paper's scores there (`published`)."""

    name: str
    scheme: str
    recipe: Recipe
    places: tuple[Place, ...]
    published: tuple[float | None, ...] = ()

    def is_meant(self, pattern: str) -> bool:
        """Return whether a pattern, as for file names, matches the name or one of its words.

        >>> cell = Cell("top-k/layer/8", "TopK(0.01)", Recipe("mnist", 8, 16, 1, "sgd", 0.1), ())
        >>> cell.is_meant("top-k"), cell.is_meant("top-k/*/8"), cell.is_meant("top")
        (True, True, False)
        """
        return fnmatchcase(self.name, pattern) or pattern in self.name.split("/")


def at_their_best(
    found: Mapping[Place, Sequence[float]], measure: Measure
) -> dict[str, tuple[str, Sequence[float]]]:
    """Return each row's best column and its scores, among the columns with the most seeds."""

    def rank(column: str, row: str) -> tuple[int, float]:
        scores = found[row, column]
        return len(scores), -fmean(scores) if measure.is_loss else fmean(scores)

    columns: dict[str, list[str]] = {}
    for row, column in found:
        columns.setdefault(row, []).append(column)
    best = {row: max(names, key=lambda name: rank(name, row)) for row, names in columns.items()}
    return {row: (column, found[row, column]) for row, column in best.items()}


@dataclass(frozen=True)
class Study:
    """A claim of a paper, and the trainings that test it.

    Arguments:
        name: The name for `python -m papers`.
        paper: The folder under papers/.
        claim: The claim to test.
        recipes: For each recipe's name, a function that returns the cells.
        seeds: The default seeds of each recipe.
        remarks: A function that returns conclusions from the scores (by place and seed).
        on_curves: A function that returns conclusions from whole results, such as their curves.
        score: The measure in the table.
        drawn: The two measures to draw over the epochs, the second on a logarithmic scale.
        shows_bytes: If True, the picture shows scores against bytes instead.
    """

    name: str
    paper: str
    claim: str
    recipes: Mapping[str, Callable[[], Sequence[Cell]]]
    seeds: Mapping[str, tuple[int, ...]]
    remarks: Callable[[Mapping[Place, Sequence[float]]], Sequence[str]]
    on_curves: Callable[[Mapping[Place, Sequence[Mapping[str, Any]]]], Sequence[str]] | None = None
    score: Measure = ACCURACY
    drawn: tuple[Measure, Measure] = (ACCURACY, LOSS)
    shows_bytes: bool = False

    @property
    def usual(self) -> str:
        """The name of the default recipe."""
        return next(iter(self.recipes))
