"""Text: bytes cut into windows, and a small GPT that learns to predict the next one.

Any file will do. Without one, it is the source code of Python's own standard library, which every
machine has that can run this.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .idx import DataError
from .models import Transformer

BYTES = 256
_MOST = 1 << 22  # bytes of a text that are read
_BLOCK = 4096  # bytes; every tenth block is for validation


@dataclass(frozen=True)
class Data:
    """A text as numbers, split into training and validation parts."""

    train: Tensor
    val: Tensor


def find(given: Path | None = None) -> Path:
    """The file that was given, or the folder with Python's standard library.

    Raises:
        DataError: it does not exist.
    """
    path = Path(sysconfig.get_path("stdlib")) if given is None else given
    if given is None and not any(path.glob("*.py")):
        raise DataError(f"there is no Python source in {path}: name a file of text with --data")
    if given is not None and not path.is_file():
        raise DataError(f"{path} is no file: name a file of text with --data")
    return path


def load(path: Path) -> Data:
    """Read a file, or all Python files in a folder, and keep a tenth of it for validation."""
    try:
        files = sorted(path.glob("*.py")) if path.is_dir() else [path]
        text = b"".join(file.read_bytes() for file in files)[:_MOST]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) < 10 * _BLOCK:
        raise DataError(f"{path} has {len(text):,} bytes, and {10 * _BLOCK:,} are the least")
    held = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    is_val = torch.arange(len(held)) // _BLOCK % 10 == 9
    return Data(held[~is_val], held[is_val])


def windows(size: int, length: int) -> int:
    """Return the number of windows that fit side by side, wherever the first one begins."""
    return (size - length - 1) // length


def order(seed: int, epoch: int, size: int, length: int) -> Tensor:
    """Return the starts of an epoch's windows in random order: side by side, randomly shifted."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    moved = int(torch.randint(length, (), generator=generator))
    return torch.randperm(windows(size, length), generator=generator) * length + moved


def cut(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return windows of a text, and the byte that follows each of their bytes."""
    places = starts[:, None] + torch.arange(length, device=text.device)
    return text[places].long(), text[places + 1].long()


def build(tokens: int, width: int, layers: int, length: int, seed: int) -> nn.Module:
    """A GPT, the same for the same seed, with weights as small as GPT-2's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(layers, width, max(1, width // 32), tokens, length)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
    return model
