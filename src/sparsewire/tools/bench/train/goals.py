"""What the score of a training means, in tables, pictures and sentences."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """What a score means, in tables, pictures and sentences."""

    task: str  # what is learned, for "97 % on MNIST"
    score: str  # what is measured
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
        """What is on that axis."""
        return f"{self.score}, nats per byte" if self.is_loss else f"{self.score}, %"


GOALS = {
    "mnist": Goal("MNIST", "test accuracy", "perceptron", "image"),
    "gpt": Goal("text", "validation loss", "GPT", "window", is_loss=True),
}
