"""What is trained in a race, and how well a network does it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...tasks import mnist, text
from ...tasks.idx import DataError

if TYPE_CHECKING:
    from .plan import Plan

LENGTH = 64  # bytes that the GPT sees


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


class Task(Protocol):
    """One rank's part of the data, and of the test."""

    def build(self) -> nn.Module:
        """The network, equal on all ranks."""

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """The loss of this rank's batch of a step, the same whoever trains."""

    def test(self, model: nn.Module) -> tuple[float, float]:
        """The sum of this rank's share of the scores, and how many they are."""


def make(plan: Plan, rank: int, workers: int) -> Task:
    """Read the data of a plan, for one rank."""
    return (_Digits if plan.model == "mnist" else _Bytes)(plan, rank, workers)


class _Batches:
    """Which examples are a rank's in a step: those of an epoch's order, one batch after another."""

    def __init__(self, plan: Plan, rank: int, workers: int, examples: int) -> None:
        needed = workers * plan.batch_size
        if needed > examples:
            raise DataError(
                f"a step of all hosts needs {needed:,} {GOALS[plan.model].example}s, but there "
                f"are {examples:,}: take a smaller --batch-size"
            )
        self._batch, self._rank, self._workers = plan.batch_size, rank, workers
        self._steps = examples // needed
        self._epoch, self._order = -1, torch.empty(0)

    def _order_of(self, epoch: int) -> Tensor:
        raise NotImplementedError

    def _chosen(self, step: int) -> Tensor:
        epoch, position = divmod(step, self._steps)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        start = (position * self._workers + self._rank) * self._batch
        return self._order[start : start + self._batch]


class _Digits(_Batches):
    """Aji and Heafield's perceptron on MNIST; the score is the share that is right."""

    def __init__(self, plan: Plan, rank: int, workers: int) -> None:
        self._plan, self._data = plan, mnist.load(Path(plan.data))
        super().__init__(plan, rank, workers, len(self._data.train))

    def build(self) -> nn.Module:
        return mnist.build(self._plan.hidden, self._plan.seed)

    def _order_of(self, epoch: int) -> Tensor:
        return mnist.order(self._plan.seed, epoch, len(self._data.train))

    def loss(self, model: nn.Module, step: int) -> Tensor:
        images, labels = self._data.train.batch(self._chosen(step))
        return cross_entropy(model(images), labels)

    def test(self, model: nn.Module) -> tuple[float, float]:
        return mnist.evaluate(model, self._data.test, self._rank, self._workers)


class _Bytes(_Batches):
    """A small GPT on text; the score is the loss of the next byte in nats."""

    def __init__(self, plan: Plan, rank: int, workers: int) -> None:
        self._plan, self._data = plan, text.load(Path(plan.data))
        super().__init__(plan, rank, workers, text.windows(len(self._data.train), LENGTH))

    def build(self) -> nn.Module:
        hidden = self._plan.hidden
        return text.build(text.BYTES, hidden[0], len(hidden), LENGTH, self._plan.seed)

    def _order_of(self, epoch: int) -> Tensor:
        return text.order(self._plan.seed, epoch, len(self._data.train), LENGTH)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        inputs, labels = text.cut(self._data.train, self._chosen(step), LENGTH)
        return cross_entropy(model(inputs).flatten(0, 1), labels.flatten())

    def test(self, model: nn.Module) -> tuple[float, float]:
        return text.evaluate(model, self._data.val, LENGTH, self._rank, self._workers)
