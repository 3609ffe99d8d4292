"""Characters: a text, cut into windows, and a small GPT that learns to predict the next one."""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from sparsewire.tools.tasks.idx import DataError
from sparsewire.tools.tasks.models import Transformer

TEXT = "tinyshakespeare.txt"
_TRAINED = 0.9  # of the text; what follows is for validation


@dataclass(frozen=True)
class Data:
    """A text in numbers: both parts, and how many different characters there are."""

    train: Tensor
    val: Tensor
    characters: int


def find(given: Path | None = None) -> Path:
    """The file with the text, packed by gzip or not.

    Looked for in `given` alone if there is one, else in ``$SPARSEWIRE_DATA/lm`` and ``./data/lm``.

    Raises:
        DataError: it is nowhere to be found.
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


def visit(seed: int, epoch: int, size: int, length: int) -> Tensor:
    """Where the windows of an epoch begin, in its order: side by side, moved by chance."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    moved = int(torch.randint(length, (), generator=generator))
    count = windows(size, length)
    return (torch.randperm(count, generator=generator) * length + moved)[:, None]


def windows(size: int, length: int) -> int:
    """How many windows of a text lie side by side, wherever the first one begins."""
    return (size - length - 1) // length


def cut(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Windows of a text, and what follows every character of theirs."""
    places = starts[:, None] + torch.arange(length, device=text.device)
    return text[places], text[places + 1]


def build(characters: int, width: int, layers: int, length: int, seed: int) -> nn.Module:
    """A GPT, the same for the same seed, with weights as small as GPT-2's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(layers, width, max(1, width // 32), characters, length)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
    return model
