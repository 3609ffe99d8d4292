"""CIFAR-10 is found, fetched, read in both published formats, and augmented as its file says."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import torch

from papers.tasks import cifar10
from sparsewire.tools.tasks.idx import DataError

PIXELS = 3 * 32 * 32


def records(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images as the files have them, all red first, and labels."""
    chance = np.random.default_rng(seed)
    pixels = chance.integers(256, size=(count, PIXELS), dtype=np.uint8)
    return pixels, chance.integers(10, size=count).astype(np.uint8)


def write_binary(folder: Path, count: int = 6) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(cifar10.BATCHES):
        pixels, labels = records(count, seed)
        (folder / f"{name}.bin").write_bytes(np.c_[labels, pixels].tobytes())
    return folder


def write_python(folder: Path, count: int = 6) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(cifar10.BATCHES):
        pixels, labels = records(count, seed)
        batch = {b"data": pixels, b"labels": labels.tolist(), b"batch_label": name.encode()}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return folder


def test_both_formats_hold_the_same(tmp_path: Path) -> None:
    binary = cifar10.load(write_binary(tmp_path / "binary"))
    python = cifar10.load(write_python(tmp_path / "python"))
    for one, other in ((binary.train, python.train), (binary.test, python.test)):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
    assert (len(binary.train), len(binary.test)) == (30, 6)
    pixels, labels = records(6, 1)  # the second batch
    assert binary.train.images[7, 3, 5].tolist() == [
        int(pixels[1, c * 1024 + 3 * 32 + 5]) for c in range(3)
    ]
    assert binary.train.labels[6:12].tolist() == labels.tolist()


def test_places_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSEWIRE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"not in data/cifar10: .*--data .*--download"):
        cifar10.find()
    here = write_python(tmp_path / "data" / "cifar10" / "cifar-10-batches-py")
    assert cifar10.find() == here.relative_to(tmp_path)
    there = write_binary(tmp_path / "elsewhere" / "cifar10" / "cifar-10-batches-bin")
    monkeypatch.setenv("SPARSEWIRE_DATA", str(tmp_path / "elsewhere"))
    assert cifar10.find() == there
    given = write_binary(tmp_path / "given")
    assert cifar10.find(given) == given
    (given / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=str(given)):
        cifar10.find(given)


def test_damage_is_named(tmp_path: Path) -> None:
    folder = write_binary(tmp_path / "cut")
    path = folder / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_3.bin has 18,437 bytes, not a multiple"):
        cifar10.load(folder)
    folder = write_binary(tmp_path / "label")
    path = folder / "test_batch.bin"
    path.write_bytes(b"\x0a" + path.read_bytes()[1:])
    with pytest.raises(DataError, match=r"test_batch.bin holds labels other than 0 to 9"):
        cifar10.load(folder)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1 + 1",)


def test_a_python_batch_makes_arrays_and_nothing_else(tmp_path: Path) -> None:
    folder = write_python(tmp_path)
    (folder / "data_batch_2").write_bytes(pickle.dumps({b"data": Evil()}, protocol=2))
    with pytest.raises(DataError, match=r"data_batch_2 .*asks for \S+eval"):
        cifar10.load(folder)
    pixels, labels = records(6, 0)
    batch = {b"data": pixels[:, :-1], b"labels": labels.tolist()}
    (folder / "data_batch_2").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(DataError, match=r"data_batch_2 holds uint8 of shape \(6, 3071\)"):
        cifar10.load(folder)


def archive(tmp_path: Path) -> bytes:
    folder = write_binary(tmp_path / "cifar-10-batches-bin")
    (folder / "readme.html").write_text("no batch")
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as members:
        members.add(folder, arcname=folder.name)
    return raw.getvalue()


def test_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = archive(tmp_path / "published")
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: io.BytesIO(content))
    folder = tmp_path / "fetched"
    with pytest.raises(DataError, match="its MD5 differs"):
        cifar10.download(folder)
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(cifar10, "MD5", hashlib.md5(content).hexdigest())
    assert cifar10.download(folder) == folder
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(f"{name}.bin" for name in cifar10.BATCHES)
    assert len(cifar10.load(folder).train) == 30


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(url: str, timeout: float) -> None:
        raise urllib.error.URLError("Temporary failure in name resolution")

    monkeypatch.setattr("urllib.request.urlopen", fail)
    with pytest.raises(DataError, match=r"cannot be fetched .*name resolution.* without a network"):
        cifar10.download(tmp_path)


def test_crops_and_flips() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (3, 32, 32, 3), generator=generator, dtype=torch.uint8)
    examples = cifar10.Examples(images, torch.tensor([7, 8, 9])).padded()
    rows = torch.tensor([[2, 4, 4, 0], [0, 4, 4, 1], [1, 0, 8, 0]])
    inputs, labels = examples.batch(rows)
    assert labels.tolist() == [9, 7, 8]
    assert inputs.shape == (3, 3, 32, 32)
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    plain, _ = cifar10.Examples(images, labels).whole(0, 3)
    torch.testing.assert_close(inputs[0], plain[2])
    torch.testing.assert_close(inputs[1], plain[0].flip(2))
    # four rows further up and four columns further right: black comes in at the edges
    torch.testing.assert_close(inputs[2][:, 4:, :28], plain[1][:, :28, 4:])
    black, _ = cifar10.Examples(torch.zeros(1, 32, 32, 3, dtype=torch.uint8), labels[:1]).whole(
        0, 1
    )
    torch.testing.assert_close(inputs[2][:, :4, :], black[0][:, :4, :])
    torch.testing.assert_close(inputs[2][:, :, 28:], black[0][:, :, 28:])


def test_bytes_become_standard_numbers() -> None:
    image = torch.full((1, 32, 32, 3), 255, dtype=torch.uint8)
    inputs, _ = cifar10.Examples(image, torch.tensor([0])).whole(0, 1)
    expected = [(1 - 0.4914) / 0.2470, (1 - 0.4822) / 0.2435, (1 - 0.4465) / 0.2616]
    assert inputs[0, :, 0, 0].tolist() == pytest.approx(expected, rel=1e-5)


def test_an_epoch_follows_from_seed_and_number() -> None:
    before = torch.get_rng_state()
    first = cifar10.visit(3, 5, 2000)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, cifar10.visit(3, 5, 2000))
    for other in (cifar10.visit(3, 6, 2000), cifar10.visit(4, 5, 2000)):
        assert not torch.equal(first, other)
    order, top, left, flip = first.unbind(1)
    assert torch.equal(order.sort().values, torch.arange(2000))
    for corner in (top, left):
        assert torch.equal(corner.unique(), torch.arange(9))
    assert 900 < int(flip.sum()) < 1100


def test_models_are_as_large_as_they_say() -> None:
    images = torch.zeros(2, 3, 32, 32)
    for is_small, tensors, numbers in ((False, 62, 11_173_962), (True, 38, 308_826)):
        model = cifar10.build(0, is_small)
        sizes = [parameter.numel() for parameter in model.parameters()]
        assert (len(sizes), sum(sizes)) == (tensors, numbers)
        assert model(images).shape == (2, 10)


def test_model_follows_from_its_seed() -> None:
    before = torch.get_rng_state()
    weights = [next(cifar10.build(seed).parameters()) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
