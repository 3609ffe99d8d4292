"""CIFAR-10: finding, downloading and reading the data, its augmentation, and the model.

All images are in memory as bytes, on the device that trains. All random choices of an epoch (order,
crops, flips) are a table that follows from (seed, epoch) alone, so a batch is one lookup.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tarfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsewire.tools.tasks.idx import DataError
from sparsewire.tools.tasks.models import resnet10, resnet18

CLASSES = 10
SIDE = 32
PADDING = 4
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # from the page of the data set
_RECORD = 1 + 3 * SIDE * SIDE  # a label, then the three colours
_FOLDERS = ("", "cifar-10-batches-bin", "cifar-10-batches-py")
_MEAN, _DEVIATION = (
    (0.4914, 0.4822, 0.4465),
    (0.2470, 0.2435, 0.2616),
)  # of training pixels, by colour


@dataclass(frozen=True)
class Examples:
    """Images as bytes, (number, row, column, colour), and their labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def padded(self) -> Examples:
        """Return the images with a black border, to be cropped."""
        border = (0, 0, PADDING, PADDING, PADDING, PADDING)
        return Examples(nn.functional.pad(self.images, border), self.labels)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised crops of 32 × 32 pixels, flipped or not, and labels.

        Args: rows: index, top, left and flip (0 or 1) of every example, as from `visit`.
        """
        chosen, top, left, flip = rows.unbind(1)
        places = torch.arange(SIDE, device=rows.device)
        down = top[:, None] + places
        across = left[:, None] + torch.where(flip[:, None] == 1, SIDE - 1 - places, places)
        crops = self.images[chosen[:, None, None], down[:, :, None], across[:, None, :]]
        return _normalised(crops), self.labels[chosen]

    def whole(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return normalised images from `start` to `stop`, not augmented, and labels."""
        return _normalised(self.images[start:stop]), self.labels[start:stop]


@dataclass(frozen=True)
class Data:
    """Both halves of CIFAR-10."""

    train: Examples
    test: Examples


def find(given: Path | None = None) -> Path:
    """Return the folder with the six batches, binary or python.

    Searches `given` if there is one, or else ``$SPARSEWIRE_DATA/cifar10`` and ``./data/cifar10``,
    and in each of these also the folder that the published archives create.

    Raises:
        DataError: they were not found.
    """
    if given is not None:
        places = [given]
    else:
        places = [Path("data/cifar10")]
        if os.environ.get("SPARSEWIRE_DATA"):
            places.insert(0, Path(os.environ["SPARSEWIRE_DATA"]) / "cifar10")
    for place in places:
        for folder in (place / name for name in _FOLDERS):
            for ending in (".bin", ""):
                if all((folder / f"{name}{ending}").is_file() for name in BATCHES):
                    return folder
    raise DataError(
        f"CIFAR-10 is not in {' nor in '.join(str(place) for place in places)}: it is not part of "
        f"sparsewire; unpack {URL} and name the folder with --data or put it into "
        "$SPARSEWIRE_DATA/cifar10, or let --download fetch it (162 MB)"
    )


def download(folder: Path) -> Path:
    """Download the published archive, check it, and write its six batches into `folder`.

    Raises:
        DataError: it cannot be reached, or is not the published archive.
    """
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / "cifar-10-binary.tar.gz.part"
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with urllib.request.urlopen(URL, timeout=30) as source, archive.open("wb") as target:
            while block := source.read(1 << 20):
                digest.update(block)
                target.write(block)
        if digest.hexdigest() != MD5:
            raise DataError(f"what {URL} sent is not the published archive: its MD5 differs")
        with tarfile.open(archive) as members:
            for member in members:
                name = Path(member.name).name
                content = members.extractfile(member)
                if name.removesuffix(".bin") in BATCHES and content is not None:
                    (folder / name).write_bytes(content.read())
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise DataError(
            f"CIFAR-10 cannot be fetched from {URL} ({reason}): without a network, copy its six "
            f"batches into {folder} or name their folder with --data"
        ) from error
    finally:
        archive.unlink(missing_ok=True)
    return find(folder)


def load(folder: Path) -> Data:
    """Read and check the six batches in `folder`."""
    is_binary = (folder / f"{BATCHES[0]}.bin").is_file()
    read = _read_binary if is_binary else _read_python
    *train, test = [read(folder / (f"{name}.bin" if is_binary else name)) for name in BATCHES]
    images = torch.cat([batch.images for batch in train])
    return Data(Examples(images, torch.cat([batch.labels for batch in train])), test)


def _read_binary(path: Path) -> Examples:
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if not len(content) or len(content) % _RECORD:
        raise DataError(
            f"{path} has {len(content):,} bytes, not a multiple of {_RECORD:,}, which a label and "
            "an image take: replace it by a fresh copy"
        )
    records = content.reshape(-1, _RECORD)
    return _examples(path, records[:, 1:], records[:, 0])


def _read_python(path: Path) -> Examples:
    try:
        with path.open("rb") as stream:
            batch = _Unpickler(stream, encoding="bytes").load()
        pixels, labels = batch[b"data"], np.asarray(batch[b"labels"])
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        raise DataError(f"{path} is no python batch of CIFAR-10 ({error}): replace it") from error
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), _RECORD - 1) or not len(labels):
        raise DataError(f"{path} holds {pixels.dtype} of shape {pixels.shape}, not its images")
    return _examples(path, pixels, labels)


class _Unpickler(pickle.Unpickler):
    """Creates arrays and plain containers, and refuses everything else in a pickle."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.ndarray.__reduce__(np.empty(0))[0]  # numpy's own, in any module
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # bytes, as Python 3 writes them for Python 2
            return lambda text, _: text.encode("latin-1")
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _examples(path: Path, pixels: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> Examples:
    """Convert images from the order of the files, by colour, to the order by pixel."""
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise DataError(f"{path} holds labels other than 0 to 9: replace it by a fresh copy")
    images = pixels.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return Examples(
        torch.from_numpy(np.ascontiguousarray(images)),
        torch.from_numpy(labels.astype(np.int64)),
    )


def build(seed: int, is_small: bool = False) -> nn.Sequential:
    """Return ResNet-18 or the small ResNet-10, the same for the same `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (resnet10 if is_small else resnet18)(CLASSES)


def visit(seed: int, epoch: int, size: int) -> Tensor:
    """Return how `epoch` visits `size` examples: a row of index, top, left and flip for each.

    Crops of a padded image, and flips, are uniform: the augmentation of He et al. 2016.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(size, generator=generator)
    corners = torch.randint(2 * PADDING + 1, (size, 2), generator=generator)
    flips = torch.randint(2, (size, 1), generator=generator)
    return torch.cat([order[:, None], corners, flips], dim=1)


def _normalised(images: Tensor) -> Tensor:
    """Return bytes by pixel as floats by colour, still stored by pixel (`channels_last`)."""
    mean, scale = _scales(images.device)
    return images.float().sub_(mean).mul_(scale).permute(0, 3, 1, 2)


@cache
def _scales(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return shift and scale of bytes; kept, because a copy to a GPU would wait for it."""
    mean, deviation = torch.tensor([_MEAN, _DEVIATION], dtype=torch.float64) * 255
    return mean.float().to(device), (1 / deviation).float().to(device)
