"""MNIST: finding and reading the data, and the model that learns it.

The whole set lies in memory as bytes; a batch is a slice of one permutation that follows
from (seed, epoch) alone, so that any step of any run can be repeated.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from . import idx
from .idx import DataError

PIXELS = 28 * 28
CLASSES = 10
FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
_MEAN, _DEVIATION = 0.1307, 0.3081  # of all training pixels, on the scale from 0 to 1


@dataclass(frozen=True)
class Examples:
    """Images as rows of bytes, and their labels."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The examples `chosen` by index: normalised images and labels."""
        images = self.images[chosen].float().div_(255).sub_(_MEAN).div_(_DEVIATION)
        return images, self.labels[chosen]


@dataclass(frozen=True)
class Data:
    """Both halves of MNIST."""

    train: Examples
    test: Examples


def find(given: Path | None = None) -> Path:
    """The folder with the four idx files.

    Looked for in `given` alone if there is one, else in ``$SPARSEWIRE_DATA/mnist``,
    ``./data/mnist`` and the source tree's own ``data/mnist``.

    Raises:
        DataError: some of the files are nowhere to be found.
    """
    if given is not None:
        places = [given]
    else:
        places = [Path("data/mnist"), Path(__file__).parents[4] / "data" / "mnist"]
        if os.environ.get("SPARSEWIRE_DATA"):
            places.insert(0, Path(os.environ["SPARSEWIRE_DATA"]) / "mnist")
    for place in places:
        if all((place / name).is_file() for name in FILES):
            return place
    missing = [name for name in FILES if not (places[0] / name).is_file()]
    raise DataError(
        f"MNIST is not in {' nor in '.join(str(place) for place in places)}: "
        f"{', '.join(missing)} missing; the four files are part of sparsewire's source tree "
        "(data/mnist): name their folder with --data, or put it into $SPARSEWIRE_DATA/mnist"
    )


def load(folder: Path, limit: int | None = None) -> Data:
    """Read and check the four files in `folder`; train on the first `limit` images only."""
    train_images, train_labels, test_images, test_labels = (folder / name for name in FILES)
    train = _pair(train_images, train_labels)
    if limit is not None:
        train = Examples(train.images[:limit].clone(), train.labels[:limit].clone())
    return Data(train, _pair(test_images, test_labels))


def _pair(images_path: Path, labels_path: Path) -> Examples:
    images, labels = idx.read(images_path), idx.read(labels_path)
    if images.shape[1:] != (28, 28):
        raise DataError(f"{images_path} holds the shape {tuple(images.shape)}, not 28 × 28 images")
    if labels.shape != images.shape[:1]:
        raise DataError(
            f"{labels_path} holds the shape {tuple(labels.shape)}, "
            f"not one label for each of {len(images):,} images"
        )
    if len(labels) == 0 or int(labels.max()) >= CLASSES:
        raise DataError(f"{labels_path} holds labels other than 0 to 9, or none")
    return Examples(images.view(len(images), PIXELS), labels.long())


def build(hidden: Sequence[int], seed: int, normalised: bool = False) -> nn.Sequential:
    """A perceptron with ReLU layers of `hidden` widths, the same for the same `seed`.

    `normalised`: with layer normalisation before every ReLU.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        widths = [PIXELS, *hidden]
        for number, (before, after) in enumerate(pairwise(widths), start=1):
            layers[f"hidden{number}"] = nn.Linear(before, after)
            if normalised:
                layers[f"norm{number}"] = nn.LayerNorm(after)
            layers[f"relu{number}"] = nn.ReLU()
        layers["output"] = nn.Linear(widths[-1], CLASSES)
        return nn.Sequential(layers)


def shapes(hidden: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of `build(hidden, ...)`, without making it."""
    with torch.device("meta"):
        model = build(hidden, seed=0)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def order(seed: int, epoch: int, size: int) -> torch.Tensor:
    """The order in which `epoch` visits `size` examples."""
    # Two numbers into one: epochs of one seed, and seeds next to each other, stay apart.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(size, generator=generator)
