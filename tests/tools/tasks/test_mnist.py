"""MNIST is found, read and ordered as its file says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparsewire.tools.tasks import idx, mnist

from . import idxfile

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def real() -> mnist.Data:
    return mnist.load(mnist.find())


def test_the_shipped_files(real: mnist.Data) -> None:
    assert (len(real.train), len(real.test)) == (60_000, 10_000)
    assert real.train.labels.bincount().tolist() == [
        5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949,
    ]  # fmt: skip
    assert real.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]


def test_batches_are_normalised(real: mnist.Data) -> None:
    images, labels = real.train.batch(torch.arange(5000))
    assert images.shape == (5000, 784)
    assert abs(float(images.mean())) < 0.02
    assert abs(float(images.std()) - 1) < 0.02
    assert torch.equal(labels, real.train.labels[:5000])


def test_limit(real: mnist.Data) -> None:
    small = mnist.load(mnist.find(), limit=100)
    assert torch.equal(small.train.images, real.train.images[:100])
    assert len(small.test) == 10_000


def test_places_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = idxfile.write_mnist(tmp_path / "given", 5, 5)
    from_variable = idxfile.write_mnist(tmp_path / "data" / "mnist", 5, 5)
    monkeypatch.chdir(tmp_path)
    assert mnist.find(given) == given
    assert mnist.find() == Path("data/mnist")
    monkeypatch.setenv("SPARSEWIRE_DATA", str(tmp_path / "data"))
    assert mnist.find() == from_variable
    monkeypatch.setenv("SPARSEWIRE_DATA", str(tmp_path / "empty"))
    assert mnist.find() == Path("data/mnist")
    monkeypatch.chdir("/")
    assert mnist.find() == ROOT / "data" / "mnist"


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = idxfile.write_mnist(tmp_path / "mnist", 5, 5)
    (folder / mnist.FILES[2]).unlink()
    with pytest.raises(idx.DataError) as caught:
        mnist.find(folder)
    sentence = str(caught.value)
    assert str(folder) in sentence
    assert mnist.FILES[2] in sentence
    assert mnist.FILES[0] not in sentence
    assert "--data" in sentence


@pytest.mark.parametrize(
    ("number", "tensor", "reason"),
    [
        (0, torch.zeros(5, 28, 27), "not 28 × 28"),
        (0, torch.zeros(5), "not 28 × 28"),
        (1, torch.zeros(4), "not one label for each of 5"),
        (3, torch.full((5,), 10), "other than 0 to 9"),
    ],
)
def test_files_that_do_not_belong(
    tmp_path: Path, number: int, tensor: torch.Tensor, reason: str
) -> None:
    folder = idxfile.write_mnist(tmp_path, 5, 5)
    idxfile.write(folder / mnist.FILES[number], idxfile.content(tensor))
    with pytest.raises(idx.DataError, match=reason):
        mnist.load(folder)


def test_model_follows_from_its_seed_and_leaves_the_generator_alone() -> None:
    before = torch.random.get_rng_state()
    first, again, other = mnist.build((8, 4), 1), mnist.build((8, 4), 1), mnist.build((8, 4), 2)
    assert torch.equal(before, torch.random.get_rng_state())
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    weights = [model.state_dict()["hidden1.weight"] for model in (first, other)]
    assert not torch.equal(*weights)


@pytest.mark.parametrize("hidden", [(), (8,), (8, 4)])
def test_shapes_are_those_of_the_model(hidden: tuple[int, ...]) -> None:
    built = {name: tuple(p.shape) for name, p in mnist.build(hidden, 0).named_parameters()}
    assert mnist.shapes(hidden) == built


def test_order_is_a_permutation_of_its_own_for_each_epoch_and_seed() -> None:
    orders = [mnist.order(seed, epoch, 1000) for seed in (0, 1) for epoch in (0, 1)]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(1000))
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert torch.equal(orders[0], mnist.order(0, 0, 1000))
