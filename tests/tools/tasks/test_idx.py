"""The idx reader takes what is sound and refuses everything else with a reason."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from sparsewire.errors import SparsewireError
from sparsewire.tools.tasks import idx

from . import idxfile

SAMPLE = torch.arange(24).view(2, 3, 4)


@pytest.mark.parametrize("shape", [(7,), (2, 3), (2, 3, 4), (0, 5)])
def test_round_trip(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(256, shape, generator=torch.Generator().manual_seed(0))
    path = idxfile.write(tmp_path / "a.gz", idxfile.content(tensor))
    read = idx.read(path)
    assert read.dtype == torch.uint8
    assert torch.equal(read, tensor.to(torch.uint8))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not an idx file"),
        (b"\0\0", "not an idx file"),
        (b"\0\0\x0d\x01" + bytes(8), "not an idx file"),  # floats
        (b"PNG\x01" + bytes(8), "begins with 50 4e 47 01"),
        (b"\0\0\x08\x00", "not an idx file"),  # no dimensions
        (b"\0\0\x08\x03\0\0\0\x01", "ends inside its header"),
        (idxfile.content(SAMPLE)[:-1], "holds only 23"),
        (idxfile.content(SAMPLE) + b"x", "holds more"),
        (b"\0\0\x08\x02" + struct.pack(">2I", 2**31, 2**31), "header is damaged"),
    ],
)
def test_unsound_content(tmp_path: Path, raw: bytes, reason: str) -> None:
    path = idxfile.write(tmp_path / "a.gz", raw)
    with pytest.raises(idx.DataError, match=reason) as caught:
        idx.read(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, SparsewireError)


def test_truncated_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(idxfile.content(SAMPLE))[:-9])
    with pytest.raises(idx.DataError, match="damaged"):
        idx.read(path)


def test_not_gzip_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(idxfile.content(SAMPLE))
    with pytest.raises(idx.DataError, match="Not a gzipped file"):
        idx.read(path)


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    """gzip's own checksum guards the content; a flip in its header may be harmless, never wrong."""
    sound = bytearray(gzip.compress(idxfile.content(SAMPLE), mtime=0))
    path = tmp_path / "a.gz"
    for position in range(8 * len(sound)):
        sound[position // 8] ^= 1 << position % 8
        path.write_bytes(sound)
        sound[position // 8] ^= 1 << position % 8
        try:
            read = idx.read(path)
        except idx.DataError:
            continue
        assert torch.equal(read, SAMPLE.to(torch.uint8))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(idx.DataError, match="No such file"):
        idx.read(tmp_path / "a.gz")
