"""What the studies train: data on one device, and everything that is random about an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..tasks import cifar10, mnist
from .recipe import Recipe

AnyExamples = TypeVar("AnyExamples", mnist.Examples, cifar10.Examples)
_TESTED = 1000  # examples looked at together


class Problem(Protocol):
    """Data, and a model to learn them."""

    def __len__(self) -> int:
        """Examples to learn from."""

    def build(self, seed: int) -> nn.Module:
        """The model before the first step."""

    def visit(self, seed: int, epoch: int) -> Tensor:
        """A row of integers for every example, in the order of `epoch`: all that `batch` needs."""

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels of some rows; nothing here is random or waits for the device."""

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The test set, in parts."""


class Mnist:
    """MNIST, and a perceptron."""

    def __init__(self, data: mnist.Data, recipe: Recipe) -> None:
        self._data, self._recipe = data, recipe

    def __len__(self) -> int:
        return len(self._data.train)

    def build(self, seed: int) -> nn.Module:
        return mnist.build(self._recipe.hidden, seed, self._recipe.normalised)

    def visit(self, seed: int, epoch: int) -> Tensor:
        return mnist.order(seed, epoch, len(self))[:, None]

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self._data.train.batch(rows[:, 0])

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        test = self._data.test
        for start in range(0, len(test), _TESTED):
            stop = min(start + _TESTED, len(test))
            yield test.batch(torch.arange(start, stop, device=test.labels.device))


class Cifar10:
    """CIFAR-10, cropped and flipped at random, and ResNet-18."""

    def __init__(self, data: cifar10.Data) -> None:
        self._train, self._test = data.train.padded(), data.test

    def __len__(self) -> int:
        return len(self._train)

    def build(self, seed: int) -> nn.Module:
        return cifar10.build(seed)

    def visit(self, seed: int, epoch: int) -> Tensor:
        return cifar10.visit(seed, epoch, len(self))

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self._train.batch(rows)

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self._test), _TESTED):
            yield self._test.whole(start, start + _TESTED)


class Shelf:
    """Problems by recipe; data are read once."""

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._read: dict[tuple[str, int | None], mnist.Data | cifar10.Data] = {}

    def get(self, recipe: Recipe) -> Problem:
        """The problem of `recipe`.

        Raises:
            DataError: its data are missing or damaged.
        """
        key = (recipe.problem, recipe.limit)
        if key not in self._read:
            self._read[key] = self._load(recipe)
        data = self._read[key]
        return Cifar10(data) if isinstance(data, cifar10.Data) else Mnist(data, recipe)

    def _load(self, recipe: Recipe) -> mnist.Data | cifar10.Data:
        if recipe.problem == "mnist":
            digits = mnist.load(mnist.find(self._folder))
            return mnist.Data(self._some(digits.train, recipe), self._some(digits.test, recipe))
        photos = cifar10.load(cifar10.find(self._folder))
        return cifar10.Data(self._some(photos.train, recipe), self._some(photos.test, recipe))

    def _some(self, examples: AnyExamples, recipe: Recipe) -> AnyExamples:
        """The first ones, if the recipe has a limit, on the device."""
        images, labels = examples.images[: recipe.limit], examples.labels[: recipe.limit]
        return replace(examples, images=images.to(self._device), labels=labels.to(self._device))
