"""What is trained while the clock runs: a model, and the loss of its next batch."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import SparsewireError
from . import mnist, models

Loss = Callable[[nn.Module], Tensor]


class WorkloadError(SparsewireError, ValueError):
    """A model that cannot be built as it was named."""


@dataclass(frozen=True)
class Workload:
    """A model, and a function that takes its next batch and returns the loss."""

    model: nn.Module
    loss: Loss
    examples: int | None = None  # in one batch, if known


def build(name: str, batch: int | None, rank: int) -> Workload:
    """The workload called `name`: one of `NAMES`, or a user's own as `module:function`.

    The function takes the rank and returns the model and the loss: `function(rank) -> (model,
    loss)`, where `loss(model)` is a scalar tensor. All ranks must build the same model.
    """
    torch.manual_seed(0)
    if name in _OWN:
        make, usual = _OWN[name]
        return make(batch or usual, rank)
    if name.count(":") != 1:
        raise WorkloadError(
            f"there is no model {name!r}: there are {', '.join(NAMES)}, or your own as "
            f"package.module:function"
        )
    module_name, function_name = name.split(":")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise WorkloadError(f"{name} cannot be imported from {os.getcwd()}: {error}") from error
    made = function(rank)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise WorkloadError(f"{name}(rank) must return (model, loss), not {type(made).__name__}")
    return Workload(*made, examples=batch)


def _perceptron(batch: int, rank: int) -> Workload:
    """Aji and Heafield's network for MNIST, 3 × 4096 hidden units, on real images."""
    data = mnist.load(mnist.find()).train
    generator = torch.Generator().manual_seed(rank)

    def loss(model: nn.Module) -> Tensor:
        chosen = torch.randint(len(data), (batch,), generator=generator)
        images, labels = data.batch(chosen)
        return functional.cross_entropy(model(images), labels)

    return Workload(mnist.build((4096, 4096, 4096), seed=0), loss, batch)


def _resnet(batch: int, rank: int) -> Workload:
    """ResNet-18 on random images of CIFAR-10's size."""
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(batch, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (batch,), generator=generator)
    return Workload(
        models.resnet18(), lambda model: functional.cross_entropy(model(images), labels), batch
    )


def _transformer(batch: int, rank: int) -> Workload:
    """A small transformer, 4 layers of width 256 and 8192 words, on random tokens."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(8192, (batch, 65), generator=generator)

    def loss(model: nn.Module) -> Tensor:
        guesses = model(tokens[:, :-1])
        return functional.cross_entropy(guesses.flatten(0, 1), tokens[:, 1:].flatten())

    model = models.Transformer(layers=4, width=256, heads=4, words=8192, context=64)
    return Workload(model, loss, batch)


_OWN: dict[str, tuple[Callable[[int, int], Workload], int]] = {
    "mnist": (_perceptron, 40),
    "resnet18": (_resnet, 16),
    "transformer": (_transformer, 8),
}
NAMES = tuple(_OWN)
