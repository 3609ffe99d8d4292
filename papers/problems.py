"""Training problems of the studies: data on one device, and the random choices of each epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsewire.tools.tasks import mnist, text

from .recipe import Recipe
from .tasks import cifar10, language, translation, translators

AnyExamples = TypeVar("AnyExamples", mnist.Examples, cifar10.Examples)
_TESTED = 1000  # examples per evaluation batch
_TRANSLATED = 2000  # sentences per evaluation batch
_SMOOTHING = 0.1  # label smoothing for translation
_BLEUS = 5  # measurements of validation BLEU per training


class Problem(Protocol):
    """A dataset and a model to train on it."""

    def __len__(self) -> int:
        """Return the number of training examples."""

    def build(self, seed: int) -> nn.Module:
        """Return the initial model."""

    def visit(self, seed: int, epoch: int) -> Tensor:
        """Return integer rows for `batch`, one per example, in the order of `epoch`."""

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels of `rows`. Deterministic; does not wait for the device."""

    def loss(self, answers: Tensor, labels: Tensor) -> Tensor:
        """Return the loss to minimise, from a model's outputs for a batch."""

    def look(self, model: nn.Module, epoch: float) -> dict[str, float]:
        """Evaluate a model after `epoch` epochs. Return the results by field."""

    def facts(self) -> dict[str, object]:
        """Return additional fields to store with a result."""


class Classes:
    """Base class of classification problems."""

    def loss(self, answers: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(answers, labels)

    def look(self, model: nn.Module, epoch: float) -> dict[str, float]:
        loss, accuracy = _test(model, self.test())
        return {"test_loss": loss, "test_accuracy": accuracy}

    def facts(self) -> dict[str, object]:
        return {}

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the test set in batches."""
        raise NotImplementedError


def _test(model: nn.Module, parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Return the mean loss and accuracy over all labels. Waits for the device."""
    totals = None
    for inputs, labels in parts:
        answers = model(inputs).flatten(0, -2).float()
        labels = labels.flatten()
        loss = functional.cross_entropy(answers, labels, reduction="sum").double()
        right = (answers.argmax(dim=1) == labels).sum()
        found = torch.stack([loss, right, (labels != translation.NO_LABEL).sum()])
        totals = found if totals is None else totals + found
    if totals is None:
        raise ValueError("there is nothing to test on")
    loss_sum, right_sum, count = totals.tolist()
    return loss_sum / count, right_sum / count


class Mnist(Classes):
    """MNIST with a multilayer perceptron."""

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


class Cifar10(Classes):
    """CIFAR-10 with random crops and flips, and a ResNet."""

    def __init__(self, data: cifar10.Data, recipe: Recipe) -> None:
        self._train, self._test, self._recipe = data.train.padded(), data.test, recipe

    def __len__(self) -> int:
        return len(self._train)

    def build(self, seed: int) -> nn.Module:
        return cifar10.build(seed, is_small=self._recipe.model == "resnet10")

    def visit(self, seed: int, epoch: int) -> Tensor:
        return cifar10.visit(seed, epoch, len(self))

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self._train.batch(rows)

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self._test), _TESTED):
            yield self._test.whole(start, start + _TESTED)


class Characters:
    """Character-level language modelling with a small GPT. The score is the loss in nats."""

    def __init__(self, data: language.Data, recipe: Recipe) -> None:
        self._data, self._recipe = data, recipe

    def __len__(self) -> int:
        return text.windows(len(self._data.train), self._recipe.length)

    def build(self, seed: int) -> nn.Module:
        hidden = self._recipe.hidden
        return text.build(self._data.characters, hidden[0], len(hidden), self._recipe.length, seed)

    def visit(self, seed: int, epoch: int) -> Tensor:
        return text.order(seed, epoch, len(self._data.train), self._recipe.length)[:, None]

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return text.cut(self._data.train, rows[:, 0], self._recipe.length)

    def loss(self, answers: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(answers.flatten(0, 1), labels.flatten())

    def look(self, model: nn.Module, epoch: float) -> dict[str, float]:
        val, length = self._data.val, self._recipe.length
        starts = torch.arange(text.windows(len(val), length), device=val.device) * length
        loss, accuracy = _test(
            model, (text.cut(val, part, length) for part in torch.split(starts, _TESTED))
        )
        return {"valid_loss": loss, "valid_accuracy": accuracy}

    def facts(self) -> dict[str, object]:
        return {"characters": self._data.characters}


@dataclass(frozen=True)
class Sentences:
    """A parallel corpus on one device, encoded with one vocabulary for both languages."""

    subwords: translation.Subwords
    train: translation.Examples
    val: translation.Examples
    sources: dict[str, Tensor]  # by set; sentences that are too long are truncated
    judges: dict[str, translation.Judge]
    left_out: int

    @classmethod
    def read(cls, folder: Path | None, recipe: Recipe, device: torch.device) -> Sentences:
        """Read the corpus, learn the subwords, and encode all sentences."""
        translation.check_libraries()
        corpus = translation.CORPORA[recipe.problem]
        text = translation.read(corpus, translation.find(corpus, folder))
        train = text.train.first(recipe.limit)
        subwords = translation.Subwords([*train.source, *train.target], recipe.vocabulary)
        examples, left_out = translation.fit(train, subwords, recipe.length)
        tests = {"valid": text.val.first(recipe.limit), "test": text.test.first(recipe.limit)}
        return cls(
            subwords,
            examples.to(device),
            translation.fit(tests["valid"], subwords, recipe.length)[0].to(device),
            {
                name: translation.cut(pairs.source, subwords, recipe.length).to(device)
                for name, pairs in tests.items()
            },
            {name: translation.Judge(pairs.target) for name, pairs in tests.items()},
            left_out,
        )


class Translation:
    """Translation from one language to another. The score is BLEU."""

    def __init__(self, sentences: Sentences, recipe: Recipe) -> None:
        self._sentences, self._recipe = sentences, recipe

    def __len__(self) -> int:
        return len(self._sentences.train)

    def build(self, seed: int) -> nn.Module:
        recipe = self._recipe
        if recipe.model not in ("rnn", "transformer"):
            raise ValueError("a recipe for translation names its model, 'rnn' or 'transformer'")
        words, layers = len(self._sentences.subwords), len(recipe.hidden)
        return translators.build(
            recipe.model, words, recipe.hidden[0], layers, recipe.normalised, seed
        )

    def visit(self, seed: int, epoch: int) -> Tensor:
        return translation.visit(seed, epoch, len(self), self._recipe.length)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self._sentences.train.batch(rows)

    def loss(self, answers: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(
            answers.flatten(0, 1), labels.flatten(), label_smoothing=_SMOOTHING
        )

    def look(self, model: nn.Module, epoch: float) -> dict[str, float]:
        """Return loss and accuracy per word, BLEU a few times, and test BLEU at the end."""
        val = self._sentences.val
        rows = torch.split(torch.arange(len(val), device=val.sources.device), _TRANSLATED)
        loss, accuracy = _test(model, (val.whole(chosen) for chosen in rows))
        found = {"valid_loss": loss, "valid_accuracy": accuracy}
        if epoch % max(1, self._recipe.epochs // _BLEUS) == 0:
            found["valid_bleu"] = self._bleu(model, "valid")
        if epoch == self._recipe.epochs:
            found["test_bleu"] = self._bleu(model, "test")
        return found

    def facts(self) -> dict[str, object]:
        sentences = self._sentences
        return {
            "pairs": len(self),
            "too_long": sentences.left_out,
            "subwords": len(sentences.subwords),
            "signature": sentences.judges["test"].signature,
        }

    def _bleu(self, model: nn.Module, part: str) -> float:
        if not isinstance(model, translators.Translator):
            raise TypeError(f"{type(model).__name__} does not translate")
        sentences = self._sentences
        found = [
            translators.translate(model, sources)
            for sources in torch.split(sentences.sources[part], _TRANSLATED)
        ]
        written = torch.cat(found).tolist()
        return sentences.judges[part].score(sentences.subwords.read(written))


_FINDERS = {"mnist": mnist.find, "cifar10": cifar10.find, "shakespeare": language.find}


class Shelf:
    """Problems by recipe, with each dataset read only once."""

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._read: dict[
            tuple[object, ...], mnist.Data | cifar10.Data | language.Data | Sentences
        ] = {}

    def get(self, recipe: Recipe) -> Problem:
        """Return the problem of `recipe`.

        Raises:
            DataError: the data are missing or damaged.
            LibraryError: a library that the data require is missing.
        """
        key = (recipe.problem, recipe.limit, recipe.vocabulary, recipe.length)
        if key not in self._read:
            self._read[key] = self._load(recipe)
        data = self._read[key]
        if isinstance(data, Sentences):
            return Translation(data, recipe)
        if isinstance(data, cifar10.Data):
            return Cifar10(data, recipe)
        if isinstance(data, language.Data):
            return Characters(data, recipe)
        return Mnist(data, recipe)

    def check(self, recipe: Recipe) -> None:
        """Check that the data of `recipe` exist. Raises the same errors as `get`."""
        if recipe.problem in translation.CORPORA:
            translation.check_libraries()
            translation.find(translation.CORPORA[recipe.problem], self._folder)
        else:
            _FINDERS[recipe.problem](self._folder)

    def _load(self, recipe: Recipe) -> mnist.Data | cifar10.Data | language.Data | Sentences:
        if recipe.problem in translation.CORPORA:
            return Sentences.read(self._folder, recipe, self._device)
        if recipe.problem == "mnist":
            digits = mnist.load(mnist.find(self._folder))
            return mnist.Data(self._some(digits.train, recipe), self._some(digits.test, recipe))
        if recipe.problem == "shakespeare":
            read = language.load(language.find(self._folder))
            return replace(
                read,
                train=read.train[: recipe.limit].to(self._device),
                val=read.val[: recipe.limit].to(self._device),
            )
        photos = cifar10.load(cifar10.find(self._folder))
        return cifar10.Data(self._some(photos.train, recipe), self._some(photos.test, recipe))

    def _some(self, examples: AnyExamples, recipe: Recipe) -> AnyExamples:
        """Return the examples, truncated to the recipe's limit if it has one, on the device."""
        images, labels = examples.images[: recipe.limit], examples.labels[: recipe.limit]
        return replace(examples, images=images.to(self._device), labels=labels.to(self._device))
