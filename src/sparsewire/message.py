"""The wire format: a fixed-size header that goes ahead, the payload whose size it announces, and a
verdict on what arrived.

Headers are compared before any payload of a step moves, because backends abort or mix up messages
of unequal length. Sizes follow from scheme and segments alone and are known before anything is
sent.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import kernels
from .errors import DamageError, DisagreementError
from .randomness import digest_int, fold, join, signed
from .segments import Segments

MAGIC = b"SPWR"
VERSION = 5
_LAYOUT = struct.Struct("<4sHHIIqQQQQ")
DIGEST_BYTES = 8
HEADER_BYTES = _LAYOUT.size + DIGEST_BYTES
VERDICT_BYTES = 16 + DIGEST_BYTES
FINE = -1
AHEAD = 3  # what keeps talk before the choice apart; 1 and 2 are the two ways of shards

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
    version: int = VERSION

    def pack(self) -> Tensor:
        """The header as uint8 tensor of `HEADER_BYTES`."""
        data = _LAYOUT.pack(
            MAGIC,
            self.version,
            0,
            self.rank,
            0,
            self.step,
            self.bucket,
            self.scheme,
            self.layout,
            self.length,
        )
        return _bytes(data + _digest(data))

    @staticmethod
    def unpack(data: Tensor, rank: int) -> Header:
        """The header that rank `rank` sent."""
        raw = data.cpu().numpy().tobytes()
        magic, version, _, sender, _, step, bucket, scheme, layout, length = _LAYOUT.unpack(
            raw[: _LAYOUT.size]
        )
        if magic != MAGIC or sender != rank or raw[_LAYOUT.size :] != _digest(raw[: _LAYOUT.size]):
            raise DisagreementError(
                f"what arrived from rank {rank} is no header of sparsewire's: "
                f"does another program use the same process group, or another version of it?"
            )
        return Header(rank, step, bucket, scheme, layout, length, version)


def _digest(data: bytes) -> bytes:
    """The digest of a header, which no key is needed for."""
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    return struct.pack("<Q", digest_int(words, 0))


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


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
class Context:
    """Which exchange a message belongs to, and which chunk of a sum. It does not travel: it is part
    of every digest.

    `is_ahead`: it belongs to what ranks talk about before they choose.
    """

    step: int
    bucket: int
    scheme: int
    layout: int
    chunk: int = 0  # also of what is not cut
    is_ahead: bool = False

    @property
    def common(self) -> int:
        """What the keys of all ranks are made of."""
        exchange = fold(self.step, self.bucket, self.scheme, self.layout)
        if self.is_ahead:
            exchange = fold(exchange, AHEAD)
        return join(exchange, self.chunk) if self.chunk else exchange

    def key(self, rank: int) -> int:
        """What the digest of this rank's message is keyed with."""
        return join(self.common, rank)


REASONS = (
    "its checksum does not match",
    "its indices are not ascending, unique and in range",
    "it holds values that are not finite",
    "its length is not what the scheme says",
)
CHECKSUM, VALUES = 0, 2


def sealed_bytes(nbytes: int) -> int:
    """The size of something of `nbytes` with a digest behind it, at a multiple of eight."""
    return -(-nbytes // 8) * 8 + DIGEST_BYTES


def seal(message: Tensor, key: int) -> Tensor:
    """The message, whose last bytes become a digest of all others."""
    body = message[:-DIGEST_BYTES]
    digest = kernels.on(message.device).digest(body, key)
    message[-DIGEST_BYTES:] = digest.view(1).view(torch.uint8)
    return message


def is_sealed(message: Tensor, key: int) -> Tensor:
    """Whether the digest is that of the message."""
    body, digest = message[:-DIGEST_BYTES], message[-DIGEST_BYTES:].view(torch.int64)
    return kernels.on(message.device).digest(body, key) == digest[0]


def damage_code(sender: int, reason: int) -> int:
    """What is wrong with a message, and whose it is, as one number; `FINE` if nothing is."""
    return sender * len(REASONS) + reason


def first_damage(findings: Tensor) -> Tensor:
    """The damage code of the first message that is not fine; `findings` say whether each one is, in
    every one of `REASONS`."""
    worst = findings.view(torch.uint8).view(-1).min(0)  # rank by rank, as the codes are
    return torch.where(worst.values == 0, worst.indices, FINE)


def first_broken(sealed: Tensor) -> Tensor:
    """The damage code of the first rank for which `sealed` does not say that all seals hold."""
    worst = sealed.view(torch.uint8).min(0)
    return torch.where(worst.values == 0, worst.indices * len(REASONS) + CHECKSUM, FINE)


def pack_verdict(damage: Tensor, unsound: Tensor, key: int) -> Tensor:
    """What a rank found, as uint8 tensor of `VERDICT_BYTES`: a damage code, and a bad span."""
    words = torch.stack([damage, unsound, damage]).view(torch.uint8)
    return seal(words, key)


def settle(verdicts: Tensor, context: Context) -> dict[int, int]:
    """Raise on all ranks if any found damage; else the first bad span of each rank that has one.

    Raises on the rank alone whose copy of a verdict does not match its digest: nobody else knows.
    """
    where = f"at step {context.step}, bucket {context.bucket}"
    words = verdicts.view(torch.int64).tolist()
    for sender, (damage, unsound, digest) in enumerate(words):
        if digest != signed(digest_int([damage & _MASK, unsound & _MASK], context.key(sender))):
            raise DamageError(
                f"the verdict of rank {sender} {where}: {REASONS[CHECKSUM]}, or the ranks are not "
                f"at the same step. This rank did not take the step and its memory did not change"
            )
    bad = {rank: unsound for rank, (_, unsound, _) in enumerate(words) if unsound != FINE}
    if bad:
        return bad  # whose messages may well be called damaged
    for receiver, (damage, _, _) in enumerate(words):
        if damage != FINE:
            sender, reason = divmod(damage, len(REASONS))
            raise DamageError(
                f"the message of rank {sender} that rank {receiver} received {where}: "
                f"{REASONS[reason]}. No rank took the step and no memory changed"
            )
    return {}


_MASK = (1 << 64) - 1


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
