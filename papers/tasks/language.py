"""Characters: a text as numbers, on which a small GPT is trained to predict the next character."""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparsewire.tools.tasks.idx import DataError

TEXT = "tinyshakespeare.txt"
_TRAINED = 0.9  # of the text for training; the rest is for validation


@dataclass(frozen=True)
class Data:
    """A text as numbers: training and validation part, and the number of different characters."""

    train: Tensor
    val: Tensor
    characters: int


def find(given: Path | None = None) -> Path:
    """Return the file with the text, gzipped or not.

    Searches `given` if there is one, or else ``$SPARSEWIRE_DATA/lm`` and ``./data/lm``.

    Raises:
        DataError: it was not found.
    """
    places = [given] if given is not None else [Path("data/lm")]
    if given is None and os.environ.get("SPARSEWIRE_DATA"):
        places.insert(0, Path(os.environ["SPARSEWIRE_DATA"]) / "lm")
    for place in places:
        for ending in ("", ".gz"):
            path = place / f"{TEXT}{ending}"
            if path.is_file():
                return path
    raise DataError(
        f"{TEXT} is not in {' nor in '.join(str(place) for place in places)}: name its folder with "
        f"--data or put it into $SPARSEWIRE_DATA/lm"
    )


def load(path: Path) -> Data:
    """Read a text."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8") as stream:
                text = stream.read()
        else:
            text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    found = sorted(set(text))
    number = {character: n for n, character in enumerate(found)}
    numbers = torch.tensor([number[character] for character in text])
    cut = int(_TRAINED * len(numbers))
    return Data(numbers[:cut], numbers[cut:], len(found))
