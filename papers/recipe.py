"""What a study consists of: recipes, cells and where they stand in the table.

A recipe is a frozen choice of everything but the scheme and the seed; functions return them. A cell
is one training, named by words with slashes between: `top-k/layer/8`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any, Literal

Place = tuple[str, str]
"""A row and a column of a study's table."""

# What came later than the first results: left out where it is as it was then, so that those count.
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
    """How a model is trained; the scheme is the cell's own.

    Arguments:
        problem: what is learnt: 'mnist', 'cifar10', the corpus that is translated, or the text of
            which a language model learns the next character.
        workers: how many take part; all of them hold the same weights.
        batch: examples per worker and step.
        epochs: passes over the training set; what does not fill a step is left out.
        optimizer: applies the mean, with momentum and weight decay: both come after the exchange.
        rate: the learning rate.
        drops: epochs after which the rate is divided by ten. What workers keep back is multiplied
            by ten then, which equals a memory of updates (γ inside), as Eghlidi and Jaggi have it.
            Not together with `warmup`.
        precision: of matrix products: 'float32', 'tf32', or 'bfloat16' by autocast. Gradients,
            exchange and weights are float32 whatever this is.
        looks: how often in an epoch the test set is looked at.
        hidden: widths of the perceptron's layers; of a translator's, on each side.
        normalised: the perceptron or translator has layer normalisation.
        limit: train and test on the first so many examples only.
        model: what translates, 'rnn' or 'transformer'; what learns CIFAR-10, ResNet-18 unless it
            is 'resnet10', which is small enough for two cores; what learns characters, 'gpt'.
        vocabulary: subwords of both languages together; fewer if the corpus holds no more.
        length: subwords that a sentence has room for, with its end.
        warmup: steps over which the rate rises to `rate`; then it falls with the root of the step,
            as Vaswani et al. have it. What workers keep back stays as it is. 0: the rate stays.
        decays_apart: with updates after every step, decoupled weight decay is applied to the shared
            weights, exactly, and not through what workers send and keep back.
        share_moments: every so many steps, workers average their second moments. 0: never.
        share_residuals: every so many steps, workers average what they keep back. 0: never.
        flush: with updates, apply the mean residual before the learning rate falls by half or more.
        drift: with updates, also go ahead of the shared weights by this many steps of their own
            recent motion.
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
            raise ValueError("a cosine begins after a warmup: give it one step at least")

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        usual = {field.name: field.default for field in fields(self) if field.name in _LATER}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if name not in usual or value != usual[name]
        }

    def rate_at(self, step: int, per_epoch: int) -> float:
        """The learning rate of a step, counted from 0."""
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
    """A number that a look at a model finds: its field in a result, its name, and its unit."""

    field: str
    name: str
    unit: float = 1.0
    is_loss: bool = False  # less is better
    digits: int = 2


ACCURACY = Measure("test_accuracy", "test accuracy, %", 100.0)
LOSS = Measure("loss", "training loss")


@dataclass(frozen=True)
class Cell:
    """One training, and where its result stands; `published` is the paper's own score."""

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


def at_their_best(
    found: Mapping[Place, Sequence[float]], measure: Measure
) -> dict[str, tuple[str, Sequence[float]]]:
    """Every row's best column and its scores, among the columns that have the most seeds."""

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
        name: what `python -m papers` calls it.
        paper: the folder under papers/.
        claim: what is to be found out.
        recipes: for every name of a recipe, a function that returns the cells.
        seeds: those taken if nobody names others, by recipe.
        remarks: what follows from the scores (by place and seed), in sentences.
        on_curves: what follows from how the trainings went, likewise, from whole results.
        score: what the table shows, in its unit; more is better.
        drawn: what the picture shows over the epochs, the second on a logarithmic scale.
        shows_bytes: the picture shows scores against bytes instead.
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
        """The recipe taken if nobody names another."""
        return next(iter(self.recipes))
