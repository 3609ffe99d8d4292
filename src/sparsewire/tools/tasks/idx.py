"""The idx file format of MNIST and its relatives: a gzip file with a short header and bytes.

The header says how many dimensions there are and how long each is, so a file is checked
against itself: wrong magic, truncation, trailing bytes and damage are all refused.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch

from sparsewire.errors import SparsewireError

_MAGIC = b"\0\0\x08"  # two zero bytes, then the code for unsigned bytes
_LARGEST = 1 << 30  # a header that claims more is damaged; nothing is allocated for it


class DataError(SparsewireError):
    """Training data that is missing or damaged; the message names the file."""


def read(path: Path) -> torch.Tensor:
    """Return the unsigned bytes of a gzipped idx file, in the shape that its header states.

    Raises:
        DataError: the file cannot be read, is no idx file, or does not hold what its header
            promises.
    """
    try:
        with gzip.open(path, "rb") as stream:
            shape = _shape(path, stream)
            size = math.prod(shape)
            # One byte more than needed shows trailing bytes without reading all of them.
            payload = bytearray(stream.read(size + 1))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        reason = str(error).rstrip(".")
        raise DataError(f"{path} is damaged ({reason}): replace it by a fresh copy") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(payload) != size:
        held = "more" if len(payload) > size else f"only {len(payload):,}"
        raise DataError(
            f"{path} promises {size:,} bytes in its header but holds {held}: "
            "replace it by a fresh copy"
        )
    if not size:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(payload, dtype=torch.uint8).view(shape)


def _shape(path: Path, stream: gzip.GzipFile) -> tuple[int, ...]:
    """The lengths of all dimensions, from the header at the start of `stream`."""
    magic = stream.read(4)
    if magic[:3] != _MAGIC or len(magic) < 4 or not magic[3]:
        raise DataError(
            f"{path} is not an idx file of unsigned bytes: it begins with "
            f"{magic.hex(' ') or 'nothing'}, where 00 00 08 and the number of dimensions belong"
        )
    lengths = stream.read(4 * magic[3])
    if len(lengths) < 4 * magic[3]:
        raise DataError(f"{path} ends inside its header: replace it by a fresh copy")
    shape = struct.unpack(f">{magic[3]}I", lengths)
    if math.prod(shape) > _LARGEST:
        raise DataError(f"{path} claims the shape {shape}, far too large: its header is damaged")
    return shape
