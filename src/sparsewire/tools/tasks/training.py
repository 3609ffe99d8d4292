"""The training task of one rank: its batches, its loss and its share of the test."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from sparsewire.report import plural

from . import mnist, text
from .idx import DataError

LENGTH = 64  # bytes that the GPT sees
_TESTED = 512  # windows of the validation text


@dataclass(frozen=True)
class Recipe:
    """The recipe of a training, whatever exchanges its gradients.

    Args:
        model: "mnist", a perceptron, or "gpt", a small GPT on text.
        hidden: widths of its layers.
        data: where the data are.
        batch_size: examples per rank and step.
        limit: how many images are trained on; all if None.
        warm_up: steps in which the learning rate rises.
    """

    model: str
    hidden: tuple[int, ...]
    seed: int
    data: str
    batch_size: int
    optimizer: str
    lr: float
    momentum: float = 0.0
    limit: int | None = None
    warm_up: int = 0

    def optimize(self, net: nn.Module) -> tuple[torch.optim.Optimizer, LambdaLR]:
        """The optimizer of a network, and how its learning rate goes."""
        parameters = net.parameters()
        optimizer: torch.optim.Optimizer
        if self.optimizer == "adagrad":
            optimizer = torch.optim.Adagrad(parameters, lr=self.lr, fused=True)
        elif self.optimizer == "adamw":
            optimizer = torch.optim.AdamW(parameters, lr=self.lr, fused=True)
        else:
            optimizer = torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)
        rise = max(self.warm_up, 1)
        return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / rise))


class Task(ABC):
    """One rank's part of the data and of the test; `steps` is how many an epoch has."""

    def __init__(
        self,
        recipe: Recipe,
        rank: int,
        workers: int,
        examples: int,
        noun: str,
        tested: int,
        tested_at_once: int,
    ) -> None:
        self.steps = steps_in_epoch(examples, recipe.batch_size, workers, noun)
        self.recipe, self.rank, self.workers = recipe, rank, workers
        self._tested, self._tested_at_once = tested, tested_at_once
        self._epoch, self._order = -1, torch.empty(0)

    def chosen(self, step: int) -> Tensor:
        """This rank's examples in a step, which are the same whoever trains."""
        epoch, position = divmod(step, self.steps)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        start = (position * self.workers + self.rank) * self.recipe.batch_size
        return self._order[start : start + self.recipe.batch_size]

    @abstractmethod
    def build(self) -> nn.Module:
        """The network, equal on all ranks."""

    @abstractmethod
    def loss(self, model: nn.Module, step: int) -> Tensor:
        """The loss of this rank's batch of a step."""

    @torch.no_grad()
    def test(self, model: nn.Module) -> tuple[float, int]:
        """The sum of this rank's share of the scores, and how many they are; both add up."""
        total, count, was_training = 0.0, 0, model.training
        model.eval()
        share = torch.arange(self.rank, self._tested, self.workers)
        for chosen in torch.split(share, self._tested_at_once):
            score, scores = self._score(model, chosen)
            total, count = total + score, count + scores
        model.train(was_training)
        return total, count

    @abstractmethod
    def _score(self, model: nn.Module, chosen: Tensor) -> tuple[float, int]:
        """The sum of the scores of some of the test's examples, and how many they are."""

    @abstractmethod
    def _order_of(self, epoch: int) -> Tensor: ...


def make(recipe: Recipe, rank: int, workers: int) -> Task:
    """Read the data of a recipe, for one rank."""
    return (_Digits if recipe.model == "mnist" else _Bytes)(recipe, rank, workers)


def steps_in_epoch(examples: int, batch_size: int, workers: int, noun: str) -> int:
    """Return the number of full steps in one pass over the examples.

    Raises:
        DataError: there are too few for a single one.
    """
    if batch_size * workers > examples:
        raise DataError(
            f"one step with --batch-size {batch_size} on {plural(workers, 'worker')} takes "
            f"{batch_size * workers:,} {noun}s, but there are {examples:,}: take a smaller "
            "--batch-size or more data"
        )
    return examples // (batch_size * workers)


class _Digits(Task):
    """A perceptron on MNIST; the score is the share that is right."""

    def __init__(self, recipe: Recipe, rank: int, workers: int) -> None:
        self._data = mnist.load(Path(recipe.data), recipe.limit)
        train, test = len(self._data.train), len(self._data.test)
        super().__init__(recipe, rank, workers, train, "image", test, 1000)

    def build(self) -> nn.Module:
        return mnist.build(self.recipe.hidden, self.recipe.seed)

    def _order_of(self, epoch: int) -> Tensor:
        return mnist.order(self.recipe.seed, epoch, len(self._data.train))

    def loss(self, model: nn.Module, step: int) -> Tensor:
        images, labels = self._data.train.batch(self.chosen(step))
        return cross_entropy(model(images), labels)

    def _score(self, model: nn.Module, chosen: Tensor) -> tuple[float, int]:
        images, labels = self._data.test.batch(chosen)
        return int((model(images).argmax(dim=1) == labels).sum()), len(labels)


class _Bytes(Task):
    """A small GPT on text; the score is the loss of the next byte in nats."""

    def __init__(self, recipe: Recipe, rank: int, workers: int) -> None:
        self._data = text.load(Path(recipe.data))
        train, val = (
            text.windows(len(part), LENGTH) for part in (self._data.train, self._data.val)
        )
        super().__init__(recipe, rank, workers, train, "window", min(_TESTED, val), 32)

    def build(self) -> nn.Module:
        hidden = self.recipe.hidden
        return text.build(text.BYTES, hidden[0], len(hidden), LENGTH, self.recipe.seed)

    def _order_of(self, epoch: int) -> Tensor:
        return text.order(self.recipe.seed, epoch, len(self._data.train), LENGTH)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        inputs, labels = text.cut(self._data.train, self.chosen(step), LENGTH)
        return cross_entropy(model(inputs).flatten(0, 1), labels.flatten())

    def _score(self, model: nn.Module, chosen: Tensor) -> tuple[float, int]:
        inputs, labels = text.cut(self._data.val, chosen * LENGTH, LENGTH)
        loss = cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum")
        return loss.item(), labels.numel()
