"""What is trained: the data of a recipe, on the device, as its problem gives them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sparsewire as sw
from papers.problems import Shelf
from papers.recipe import Recipe
from papers.tasks import cifar10, translation
from papers.trainer import Trainer
from sparsewire.tools.tasks.idx import DataError
from tests.papers.tasks import textpairs
from tests.papers.tasks.test_cifar10 import write_binary
from tests.tools.tasks import idxfile

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
    whole = trainer.simulation.segments.dense_size
    share = float(changed.sum()) / len(before)
    assert 0.005 < share < 0.05 + whole / len(before)
    for name, parameter in trainer.model.named_parameters():
        if parameter.dim() == 1:  # they travel whole
            assert not torch.equal(parameter, dict(cifar10.build(0).named_parameters())[name]), name


def test_missing_data_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="CIFAR-10 is not in"):
        Shelf(tmp_path, CPU).get(PHOTOS)
    with pytest.raises(DataError, match="Tatoeba English–Romanian is not in"):
        Shelf(tmp_path, CPU).get(TEXT)


TEXT = Recipe(
    "tatoeba-en-ro",
    2,
    16,
    15,
    "adam",
    0.01,
    hidden=(48,),
    normalised=True,
    model="rnn",
    vocabulary=100,
    length=24,
    warmup=20,
)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    corpus = translation.CORPORA["tatoeba-en-ro"]
    textpairs.write(tmp_path / corpus.name, corpus, train=320, test=10)
    return tmp_path


def test_translation_learns(texts: Path) -> None:
    """Backwards and word by word: BLEU says how well."""
    problem = Shelf(texts, CPU).get(TEXT)
    outcome = Trainer(TEXT, sw.parse("Threshold(0.1)"), problem, 0, CPU).run(lambda look: None)
    result = outcome.to_dict()
    curves = result["curves"]
    assert isinstance(curves, dict)
    assert [n + 1 for n, found in enumerate(curves["valid_bleu"]) if found is not None] == [
        3,
        6,
        9,
        12,
        15,
    ]
    assert curves["test_bleu"][:-1] == [None] * 14
    assert result["test_bleu"] == curves["test_bleu"][-1] > 5
    assert curves["valid_loss"][-1] < 0.7 * curves["valid_loss"][0]
    assert curves["valid_accuracy"][-1] > curves["valid_accuracy"][0]
    facts = problem.facts()
    assert (facts["pairs"], facts["too_long"], facts["subwords"]) == (320, 0, 100)
    assert "version:" in str(facts["signature"])


def test_translation_is_read_once_for_all_models(texts: Path) -> None:
    shelf = Shelf(texts, CPU)
    one = shelf.get(TEXT)
    other = shelf.get(replace(TEXT, model="transformer", normalised=False, limit=None))
    assert one.batch(one.visit(0, 0)[:4])[0].shape == (4, 2, 24)
    assert getattr(one, "_sentences") is getattr(other, "_sentences")  # noqa: B009
    assert len(shelf.get(replace(TEXT, limit=40))) == 40
    kinds = [type(problem.build(0)).__name__ for problem in (one, other)]
    assert kinds == ["Recurrent", "Transformer"]


def test_padding_does_not_count(texts: Path) -> None:
    """The loss of a look is that of words alone, and does not depend on the room."""
    recipe = replace(TEXT, model="transformer")
    short, long = (Shelf(texts, CPU).get(replace(recipe, length=n)) for n in (24, 40))
    model = short.build(0).eval()
    one, other = (problem.look(model, 0.5) for problem in (short, long))
    assert one == {name: pytest.approx(value, rel=1e-5) for name, value in other.items()}
    assert set(one) == {"valid_loss", "valid_accuracy"}
