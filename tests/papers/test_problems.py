"""What is trained: the data of a recipe, on the device, as its problem gives them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sparsewire as sw
from sparsewire.papers.problems import Shelf
from sparsewire.papers.recipe import Recipe
from sparsewire.papers.trainer import Trainer
from sparsewire.tasks import cifar10
from sparsewire.tasks.idx import DataError
from tests.tasks import idxfile
from tests.tasks.test_cifar10 import write_binary

CPU = torch.device("cpu")
DIGITS = Recipe("mnist", 2, 4, 1, "adagrad", 0.01, hidden=(16,), normalised=True, limit=20)
PHOTOS = Recipe("cifar10", 2, 2, 1, "sgd", 0.1, precision="bfloat16", limit=9)


def test_mnist(tmp_path: Path) -> None:
    shelf = Shelf(idxfile.write_mnist(tmp_path, 30, 25), CPU)
    problem = shelf.get(DIGITS)
    assert len(problem) == 20
    inputs, labels = problem.batch(problem.visit(0, 0)[:6])
    assert (inputs.shape, labels.shape) == ((6, 784), (6,))
    assert sum(len(labels) for _, labels in problem.test()) == 20
    names = [name for name, _ in problem.build(0).named_parameters()]
    assert "norm1.weight" in names


@pytest.mark.timeout(100)
def test_cifar10_trains(tmp_path: Path) -> None:
    """A step of ResNet-18: all of its tensors get gradients, and worker 0 its statistics."""
    problem = Shelf(write_binary(tmp_path), CPU).get(PHOTOS)
    trainer = Trainer(PHOTOS, sw.parse("Scheme(TopK(0.01), scope='global')"), problem, 0, CPU)
    before = trainer.weights.detach().clone()
    outcome = trainer.run(lambda look: None)
    assert outcome.parameters == 11_173_962
    assert outcome.steps == 2
    assert not outcome.diverged
    changed = trainer.weights.detach() != before
    whole = trainer.simulation.segments.whole_size
    share = float(changed.sum()) / len(before)
    assert 0.005 < share < 0.05 + whole / len(before)
    for name, parameter in trainer.model.named_parameters():
        if parameter.dim() == 1:  # they travel whole
            assert not torch.equal(parameter, dict(cifar10.build(0).named_parameters())[name]), name


def test_missing_data_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="CIFAR-10 is not in"):
        Shelf(tmp_path, CPU).get(PHOTOS)
