"""Workloads that are timed: a model, and the loss of its next batch."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsewire.errors import SparsewireError

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


def check(name: str) -> None:
    """Raise an error for a name that `build` does not know, and for missing data."""
    if name == "mnist":
        mnist.find()
    elif name not in NAMES:
        _import(name)


def build(name: str, batch: int | None, rank: int) -> Workload:
    """Build the workload `name`: one of `NAMES`, or a user's own as `module:function`.

    The function takes the rank and returns the model and the loss: `function(rank) -> (model,
    loss)`, where `loss(model)` is a scalar tensor. All ranks must build the same model.
    """
    torch.manual_seed(0)
    if name in NAMES:
        make, usual = _OWN[name]
        return make(batch or usual, rank)
    function = _import(name)
    try:
        made = function(rank)
    except Exception as error:
        raise WorkloadError(f"{name}({rank}) failed with {_told(error)}") from error
    if not (
        isinstance(made, tuple)
        and len(made) == 2
        and isinstance(made[0], nn.Module)
        and callable(made[1])
    ):
        raise WorkloadError(
            f"{name}(rank) must return a model and a function that takes it and returns the loss "
            f"of the next batch, not {_kind(made)}"
        )
    return Workload(*made, examples=batch)


def rehearse(workload: Workload, name: str) -> None:
    """Run one step without an exchange, to report errors in a user's model early."""
    try:
        loss = workload.loss(workload.model)
    except Exception as error:
        raise WorkloadError(f"the loss of {name} failed with {_told(error)}") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise WorkloadError(
            f"the loss of {name} must be a tensor with one number that depends on the model, "
            f"not {_kind(loss)}"
        )
    loss.backward()  # type: ignore[no-untyped-call]
    named = [(key, p) for key, p in workload.model.named_parameters() if p.requires_grad]
    if not named:
        raise WorkloadError(f"the model of {name} has no parameter to train")
    for key, parameter in named:
        if parameter.grad is None:
            raise WorkloadError(
                f"{key} in the model of {name} gets no gradient, which DDP would wait for: "
                f"use it in the loss, or set its requires_grad to False"
            )
    workload.model.zero_grad()


def _import(name: str) -> Callable[[int], object]:
    """Import a user's function."""
    module, _, attribute = name.partition(":")
    if not (module and attribute.isidentifier()):
        raise WorkloadError(
            f"there is no model {name!r}: there are {', '.join(NAMES)}, or your own as "
            f"package.module:function"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise WorkloadError(
            f"{name} cannot be imported from {os.getcwd()}: {_told(error)}"
        ) from error
    if not callable(function):
        raise WorkloadError(f"{name} must be a function of the rank, not {_kind(function)}")
    return cast(Callable[[int], object], function)


def _told(error: Exception) -> str:
    """Describe an error in one line."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _kind(thing: object) -> str:
    """Describe an object for an error message."""
    if isinstance(thing, Tensor):
        return f"a tensor of shape {tuple(thing.shape)}"
    if isinstance(thing, tuple):
        return f"({', '.join(type(part).__name__ for part in thing)})"
    return type(thing).__name__


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
