"""The wire format: a fixed-size header that goes ahead, and the payload whose size it announces.

Headers are compared before any payload moves, because backends abort or mix up messages of
unequal length. Sizes follow from scheme and segments alone and are known before anything is sent.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import DamageError, DisagreementError
from .segments import Segments

MAGIC = b"SPWR"
VERSION = 2
_LAYOUT = struct.Struct("<4sHHIiqQQQQ")
HEADER_BYTES = _LAYOUT.size
FINE = -1
CHECKSUM_BYTES = 4
_CONTEXT = struct.Struct("<IqQ")
_VERDICT = struct.Struct("<iBxxxI")
VERDICT_BYTES = _VERDICT.size

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


@dataclass(frozen=True)
class Damage:
    """What is wrong with a message, and whose it is."""

    sender: int
    reason: str


class Damaged(Exception):
    """Raised while a message is read; becomes a `Damage` once the sender is known."""


REASONS = (
    "its checksum does not match",
    "its indices are not ascending, unique and in range",
    "it holds values that are not finite",
    "it cannot be decoded",
    "its length is not what the scheme says",
)


def checksum(body: Tensor, rank: int, step: int, bucket: int) -> int:
    """CRC-32 of a message and of whose, which step's and which bucket's it is."""
    context = zlib.crc32(_CONTEXT.pack(rank, step, bucket))
    return zlib.crc32(body.cpu().numpy().data, context)


def seal(body: Tensor, rank: int, step: int, bucket: int) -> Tensor:
    """The message with its checksum behind it."""
    crc = checksum(body, rank, step, bucket).to_bytes(CHECKSUM_BYTES, "little")
    return torch.cat([body, torch.tensor(list(crc), dtype=torch.uint8, device=body.device)])


def unseal(message: Tensor, rank: int, step: int, bucket: int) -> Tensor:
    """The message without its checksum, which must match."""
    body, crc = message[:-CHECKSUM_BYTES], bytes(message[-CHECKSUM_BYTES:].tolist())
    if checksum(body, rank, step, bucket) != int.from_bytes(crc, "little"):
        raise Damaged(REASONS[0])
    return body


def check_indices(indices: Tensor, size: int, room: int) -> None:
    """Refuse indices that are not ascending, unique and in range, "nowhere" at the end aside."""
    if indices.numel() != room:
        raise Damaged(REASONS[3])
    if not room:
        return
    rising = indices[1:] > indices[:-1]
    if rising.count_nonzero() < room - 1:  # counting takes half as long as all()
        rising |= indices[1:] == size
        if not rising.all():
            raise Damaged(REASONS[1])
    if indices[0] < 0 or indices[-1] > size:
        raise Damaged(REASONS[1])


def pack_verdict(damage: Damage | None, digest: int) -> Tensor:
    """What a rank found, as uint8 tensor of `VERDICT_BYTES`: damage, and a checksum of the sum."""
    sender = FINE if damage is None else damage.sender
    reason = 0 if damage is None else REASONS.index(damage.reason)
    return torch.frombuffer(bytearray(_VERDICT.pack(sender, reason, digest)), dtype=torch.uint8)


def agree(verdicts: Sequence[Tensor], step: int, bucket: int) -> None:
    """Raise on all ranks if any found damage, or if the sums that they hold are not the same."""
    found = [_VERDICT.unpack(verdict.cpu().numpy().tobytes()) for verdict in verdicts]
    where = f"at step {step}, bucket {bucket}"
    for receiver, (sender, reason, _) in enumerate(found):
        if sender != FINE:
            words = REASONS[reason] if reason < len(REASONS) else "it is damaged"
            raise DamageError(
                f"the message of rank {sender} that rank {receiver} received {where}: {words}. No "
                f"rank took the step and no memory changed"
            )
    digests = Counter(digest for _, _, digest in found)
    usual = digests.most_common(1)[0][0]
    odd = [rank for rank, (_, _, digest) in enumerate(found) if digest != usual]
    if odd:
        raise DamageError(
            f"the sum that rank {odd[0]} received {where} is not what the others hold. No rank "
            f"took the step and no memory changed"
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
