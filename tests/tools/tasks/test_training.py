"""What ranks train on: every example once in an epoch, the same network, and an optimizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from sparsewire.tools.tasks import mnist, text, training
from sparsewire.tools.tasks.idx import DataError
from sparsewire.tools.tasks.training import Recipe

from . import idxfile


@pytest.fixture
def digits(tmp_path: Path) -> Recipe:
    """A perceptron on 100 images."""
    data = idxfile.write_mnist(tmp_path, 100, 30)
    return Recipe("mnist", (8,), 0, str(data), batch_size=6, optimizer="sgd", lr=0.1)


@pytest.fixture
def letters(tmp_path: Path) -> Recipe:
    """A GPT on a text of 50,000 bytes."""
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)) * 500)
    return Recipe("gpt", (32,), 0, str(path), batch_size=4, optimizer="adamw", lr=0.01, warm_up=4)


def test_ranks_share_an_epoch_and_take_every_example_once(digits: Recipe) -> None:
    tasks = [training.make(digits, rank, 4) for rank in range(4)]
    assert tasks[0].steps == 100 // 24
    first = torch.cat([task.chosen(step) for step in range(4) for task in tasks])
    assert len(first.unique()) == len(first) == 96
    second = torch.cat([task.chosen(step) for step in range(4, 8) for task in tasks])
    assert len(second.unique()) == 96
    assert not torch.equal(first, second), "another epoch, another order"
    assert torch.equal(tasks[2].chosen(1), first.view(4, 4, 6)[1, 2]), "whatever came before"


@pytest.mark.parametrize("kind", ["digits", "letters"])
def test_all_ranks_begin_with_the_same_network_and_can_train_it(
    kind: str, request: pytest.FixtureRequest
) -> None:
    recipe: Recipe = request.getfixturevalue(kind)
    tasks = [training.make(recipe, rank, 2) for rank in range(2)]
    net, other = tasks[0].build(), tasks[1].build()
    assert all(map(torch.equal, net.state_dict().values(), other.state_dict().values()))
    optimizer, schedule = recipe.optimize(net)
    before = tasks[0].loss(net, 0).item()
    assert before != tasks[1].loss(net, 0).item(), "other examples"
    for _ in range(10):
        optimizer.zero_grad()
        tasks[0].loss(net, 0).backward()
        optimizer.step()
        schedule.step()
    assert tasks[0].loss(net, 0).item() < before
    total, count = (sum(each) for each in zip(*(task.test(net) for task in tasks), strict=True))
    assert 0 < total / count < 10
    alone, of_all = training.make(recipe, 0, 1).test(net)
    assert count == of_all, "their shares are the whole test set"
    assert total == pytest.approx(alone)


def test_the_learning_rate_rises_if_it_is_to_warm_up(letters: Recipe, digits: Recipe) -> None:
    net = torch.nn.Linear(2, 2)
    rates = []
    optimizer, schedule = letters.optimize(net)
    for _ in range(6):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])
    optimizer, schedule = replace(digits, momentum=0.5).optimize(net)
    assert optimizer.defaults["momentum"] == 0.5
    assert schedule.get_last_lr() == [0.1]


def test_too_few_examples_for_a_step(digits: Recipe) -> None:
    with pytest.raises(DataError, match="--batch-size 6 on 17 workers takes 102 images, but"):
        training.make(digits, 0, 17)
    with pytest.raises(DataError, match="there are 20"):
        training.make(replace(digits, limit=20), 0, 4)


@pytest.mark.parametrize("workers", [1, 3, 7])
def test_right_answers_add_up_over_ranks(workers: int) -> None:
    recipe = Recipe("mnist", (16,), 0, str(mnist.find()), batch_size=6, optimizer="sgd", lr=0.1)
    net = mnist.build((16,), 0)
    whole = training.make(recipe, 0, 1).test(net)
    shares = [training.make(recipe, rank, workers).test(net) for rank in range(workers)]
    assert tuple(map(sum, zip(*shares, strict=True))) == whole
    assert whole[1] == 10_000


def test_the_score_of_a_text_is_the_loss_of_each_byte() -> None:
    recipe = Recipe("gpt", (32,), 0, str(text.find()), batch_size=4, optimizer="adamw", lr=0.01)
    task = training.make(recipe, 0, 1)
    net, data = task.build(), text.load(text.find())
    whole, count = task.test(net)
    inputs, labels = text.cut(data.val, torch.arange(64) * training.LENGTH, training.LENGTH)
    some = cross_entropy(net(inputs).flatten(0, 1), labels.flatten()).item()
    assert whole / count == pytest.approx(some, rel=0.05)
