"""The plan of `bench train`, its defaults, and the meaning of scores; plain data."""

from __future__ import annotations

from dataclasses import dataclass

from ...tasks.training import Recipe

LEARNING_RATES = {"adagrad": 0.005, "sgd": 0.05, "adamw": 0.002}
MOMENTUM = 0.9  # of sgd, without which it gets there late
WARM_UP = 50  # steps in which the rate of adamw rises


@dataclass(frozen=True)
class Goal:
    """The meaning of a score in tables, pictures and sentences."""

    task: str  # as in "97 % on MNIST"
    score: str  # the measured quantity
    network: str
    example: str  # one of a batch
    is_loss: bool = False

    def reached(self, score: float, target: float) -> bool:
        """Whether a score is as good as the target."""
        return score <= target if self.is_loss else score >= target

    def best(self, scores: list[float]) -> float:
        """The best of them."""
        return min(scores) if self.is_loss else max(scores)

    def shown(self, score: float) -> str:
        """A score as people read it."""
        return f"{score:.3f}" if self.is_loss else f"{100 * score:.2f} %"

    def aim(self, target: float) -> str:
        """The target in words."""
        of = f"a loss of {target:g}" if self.is_loss else f"{100 * target:.4g} %"
        return f"{of} on {self.task}"

    def height(self, score: float) -> float:
        """A score on the axis of the picture."""
        return score if self.is_loss else 100 * score

    @property
    def axis(self) -> str:
        """The title of that axis."""
        return f"{self.score}, nats per byte" if self.is_loss else f"{self.score}, %"


GOALS = {
    "mnist": Goal("MNIST", "test accuracy", "perceptron", "image"),
    "gpt": Goal("text", "validation loss", "GPT", "window", is_loss=True),
}


@dataclass(frozen=True)
class Usual:
    """The defaults of one model."""

    target: float
    schemes: tuple[str, ...]
    hidden: tuple[int, ...]
    batch_size: int
    optimizer: str
    limit_steps: int


USUAL = {
    "mnist": Usual(0.97, ("TopK(0.01)", "Threshold(0.01)"), (4096,) * 3, 40, "adagrad", 400),
    "gpt": Usual(
        1.9, ("updates Scheme(TopK(0.01), values=TwoBit())",), (128,) * 4, 8, "adamw", 2000
    ),
}


@dataclass(frozen=True, kw_only=True)
class Plan(Recipe):
    """One race.

    Args:
        contenders: their names, in the order of training.
        target: the score that ends a training.
        evaluate_every: steps between two tests.
        limit_steps: steps after which a training ends without the target.
        timeout: seconds after which a step counts as hung.
    """

    contenders: tuple[str, ...]
    target: float
    evaluate_every: int
    limit_steps: int
    timeout: float
