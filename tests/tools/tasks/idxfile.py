"""Writes small idx files for the tests."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import torch

from sparsewire.tools.tasks import mnist


def content(tensor: torch.Tensor) -> bytes:
    """The uncompressed idx file that holds `tensor`."""
    header = bytes([0, 0, 8, tensor.dim()]) + struct.pack(f">{tensor.dim()}I", *tensor.shape)
    return header + tensor.to(torch.uint8).numpy().tobytes()


def write(path: Path, raw: bytes) -> Path:
    """Write `raw` as a gzip file."""
    path.write_bytes(gzip.compress(raw, compresslevel=1))
    return path


def write_mnist(folder: Path, train: int, test: int) -> Path:
    """The beginning of the real MNIST, so that tests load and evaluate quickly."""
    folder.mkdir(parents=True, exist_ok=True)
    real = mnist.load(mnist.find())
    halves = [(real.train, train), (real.test, test)]
    tensors = []
    for examples, count in halves:
        tensors += [examples.images[:count].view(-1, 28, 28), examples.labels[:count]]
    for name, tensor in zip(mnist.FILES, tensors, strict=True):
        write(folder / name, content(tensor))
    return folder
