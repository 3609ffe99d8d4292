"""The wire format: a fixed-size header that goes ahead, and the payload whose size it announces.

Headers are compared before any payload moves, because backends abort or mix up messages of
unequal length. Sizes follow from scheme and segments alone and are known before anything is sent.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import DisagreementError
from .segments import Segments

MAGIC = b"SPWR"
VERSION = 1
_LAYOUT = struct.Struct("<4sHHIiqQQQQ")
HEADER_BYTES = _LAYOUT.size
FINE = -1

_FIELDS = {
    "version": "the version of sparsewire's wire format",
    "scheme": "the scheme, or on attach's options",
    "layout": "the parameters' names, order, shapes or types",
    "step": "the step",
    "bucket": "which bucket comes next",
    "length": "the length of the message",
}


@dataclass(frozen=True)
class Header:
    """What a rank says about its message before it sends it."""

    rank: int
    step: int
    bucket: int
    scheme: int
    layout: int
    length: int
    unsound: int = FINE  # number of the first parameter with NaN or infinity
    version: int = VERSION

    def pack(self) -> Tensor:
        """The header as uint8 tensor of `HEADER_BYTES`."""
        data = _LAYOUT.pack(
            MAGIC,
            self.version,
            0,
            self.rank,
            self.unsound,
            self.step,
            self.bucket,
            self.scheme,
            self.layout,
            self.length,
        )
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @staticmethod
    def unpack(data: Tensor, rank: int) -> Header:
        """The header that rank `rank` sent."""
        raw = data.cpu().numpy().tobytes()
        magic, version, _, sender, unsound, step, bucket, scheme, layout, length = _LAYOUT.unpack(
            raw
        )
        if magic != MAGIC or sender != rank:
            raise DisagreementError(
                f"what arrived from rank {rank} is no header of sparsewire's: "
                f"does another program use the same process group?"
            )
        return Header(rank, step, bucket, scheme, layout, length, unsound, version)


def compare(headers: Sequence[Header], own: Header, scheme: str) -> None:
    """Refuse to go on unless all ranks said the same; every rank raises the same way."""
    for name, words in _FIELDS.items():
        said = [getattr(header, name) for header in headers]
        usual, votes = Counter(said).most_common(1)[0]
        if votes == len(said):
            continue
        odd = [rank for rank, value in enumerate(said) if value != usual]
        who = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))}"
        detail = "" if name in ("scheme", "layout") else f" ({said[odd[0]]} instead of {usual})"
        raise DisagreementError(
            f"{who} of {len(said)} disagree{'s' if len(odd) == 1 else ''} with the others on "
            f"{words}{detail}, at step {own.step}, bucket {own.bucket}; this is rank {own.rank} "
            f"with {scheme}. All ranks must run the same code, model and scheme"
        )


def fingerprint(*texts: str) -> int:
    """64 bits that differ when any text does."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(text.encode())
        digest.update(b"\0")
    return int.from_bytes(digest.digest(), "little")


def layout_fingerprint(segments: Segments, dtype: torch.dtype) -> int:
    """64 bits that differ when names, order, shapes or the ledger's type do."""
    return fingerprint(str(dtype), *(f"{s.name}:{s.shape}" for s in segments.spans))
