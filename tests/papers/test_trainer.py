"""One model for all workers trains as W models do, and tells what it did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sparsewire as sw
from papers.problems import Classes, Mnist
from papers.recipe import Recipe
from papers.trainer import Trainer
from papers.training import Look
from sparsewire.tools.tasks import mnist

CPU = torch.device("cpu")
RECIPE = Recipe(
    problem="mnist",
    workers=3,
    batch=4,
    epochs=3,
    optimizer="sgd",
    rate=0.05,
    momentum=0.9,
    weight_decay=0.01,
    drops=(2,),
    precision="float32",
    looks=2,
    hidden=(40, 30),
    normalised=True,
)


def some(count: int, seed: int) -> mnist.Examples:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, 784), generator=generator, dtype=torch.uint8)
    return mnist.Examples(images, torch.randint(10, (count,), generator=generator))


DATA = mnist.Data(some(50, 0), some(30, 1))


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def by_hand(recipe: Recipe, scheme: str, seed: int) -> dict[str, Tensor]:
    """The same training as a user would write it: W models' gradients, `simulate`, an optimizer."""
    model = mnist.build(recipe.hidden, seed, recipe.normalised)
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=recipe.rate,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
    )
    states = [sw.functional.init(scheme, named) for _ in range(recipe.workers)]
    steps = len(DATA.train) // (recipe.workers * recipe.batch)
    for epoch in range(recipe.epochs):
        order = mnist.order(seed, epoch, len(DATA.train))
        rate = recipe.rate_at(epoch * steps, steps)
        for group in optimizer.param_groups:
            if group["lr"] != rate:
                for state in states:
                    for fields in state.memory.values():
                        fields["residual"].mul_(group["lr"] / rate)
                group["lr"] = rate
        for step in range(steps):
            gradients = []
            for rank in range(recipe.workers):
                start = (step * recipe.workers + rank) * recipe.batch
                images, labels = DATA.train.batch(order[start : start + recipe.batch])
                loss = cross_entropy(model(images), labels)
                found = torch.autograd.grad(loss, list(named.values()))
                gradients.append(dict(zip(named, found, strict=True)))
            mean, states = sw.functional.simulate(gradients, states)
            for name, parameter in named.items():
                parameter.grad = mean[name]
            optimizer.step()
    return {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize(
    "scheme",
    ["Dense()", "Scheme(TopK(0.02), dense_below=100)", "Scheme(RandomK(0.05), scope='global')"],
)
def test_the_same_as_by_hand(scheme: str) -> None:
    trainer = Trainer(RECIPE, sw.parse(scheme), Mnist(DATA, RECIPE), 7, CPU)
    looks: list[Look] = []
    outcome = trainer.run(looks.append)
    expected = by_hand(RECIPE, scheme, 7)
    for name, found in weights(trainer).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-6)
    assert outcome.steps == 3 * 4
    assert [look.step for look in looks] == [2, 4, 6, 8, 10, 12]
    assert [look.epoch for look in looks] == [0.5, 1, 1.5, 2, 2.5, 3]
    assert list(outcome.looks) == looks
    assert not outcome.diverged


def test_the_test_set_is_looked_at() -> None:
    trainer = Trainer(RECIPE, sw.parse("Dense()"), Mnist(DATA, RECIPE), 0, CPU)
    last = trainer.run(lambda look: None).looks[-1]
    images, labels = DATA.test.batch(torch.arange(30))
    with torch.no_grad():
        answers = trainer.model(images)
    right = float((answers.argmax(1) == labels).float().mean())
    assert last.found["test_accuracy"] == pytest.approx(right)
    assert last.found["test_loss"] == pytest.approx(float(cross_entropy(answers, labels)), rel=1e-5)


def test_adagrad_is_torchs_own() -> None:
    recipe = replace(RECIPE, optimizer="adagrad", epochs=1, drops=(), momentum=0.0)
    trainer = Trainer(recipe, sw.parse("Dense()"), Mnist(DATA, recipe), 0, CPU)
    assert isinstance(trainer._optimizer, torch.optim.Adagrad)
    losses = [look.loss for look in trainer.run(lambda look: None).looks]
    assert losses[-1] < losses[0]


def test_adam_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(RECIPE, optimizer="adam", warmup=4, rate=0.01, drops=(), momentum=0.0)
    trainer = Trainer(recipe, sw.parse("TopK(0.1)"), Mnist(DATA, recipe), 0, CPU)
    optimizer, rates, before = trainer._optimizer, list[float](), trainer.weights.detach().clone()
    assert isinstance(optimizer, torch.optim.Adam)
    monkeypatch.setattr(trainer.simulation, "scale", lambda factor: pytest.fail("scaled"))
    optimizer.register_step_post_hook(lambda *given: rates.append(optimizer.param_groups[0]["lr"]))
    losses = [look.loss for look in trainer.run(lambda look: None).looks]
    assert losses[-1] < losses[0]
    assert not torch.equal(trainer.weights, before)
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert rates[4:] == pytest.approx([0.01 * (4 / step) ** 0.5 for step in range(5, 13)])


def test_a_training_that_diverges_ends_early() -> None:
    recipe = replace(RECIPE, rate=1e30, normalised=False, momentum=0.0, drops=())
    outcome = Trainer(recipe, sw.parse("TopK(0.1)"), Mnist(DATA, recipe), 0, CPU).run(
        lambda look: None
    )
    assert outcome.diverged
    assert len(outcome.looks) < 6


def test_too_few_examples_are_refused() -> None:
    recipe = replace(RECIPE, batch=20)
    with pytest.raises(ValueError, match="50 examples cannot fill one step"):
        Trainer(recipe, sw.parse("Dense()"), Mnist(DATA, recipe), 0, CPU)


class Normed(Classes):
    """Numbers through batch normalisation."""

    def __len__(self) -> int:
        return 24

    def build(self, seed: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 10))

    def visit(self, seed: int, epoch: int) -> Tensor:
        return torch.arange(24)[:, None]

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows.float() * torch.tensor([1.0, 2.0, 3.0]), rows[:, 0] % 10

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.batch(torch.arange(4)[:, None])


def test_batch_statistics_are_those_of_the_first_worker() -> None:
    recipe = replace(RECIPE, batch=8, epochs=1, looks=1)
    trainer = Trainer(recipe, sw.parse("Dense()"), Normed(), 0, CPU)
    trainer.run(lambda look: None)
    norm = next(part for part in trainer.model.modules() if isinstance(part, nn.BatchNorm1d))
    assert int(norm.num_batches_tracked or 0) == 1
    assert norm.running_mean is not None
    assert float(norm.running_mean[0]) == pytest.approx(0.1 * fmean(range(8)))
