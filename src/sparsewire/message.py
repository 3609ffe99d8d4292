"""The wire format: a fixed-size header that goes ahead, the payload whose size it announces, and a
status on what arrived.

Headers are compared before any payload of a step moves, because backends abort or mix up messages
of unequal length. Sizes follow from scheme and segments alone and are known before anything is
sent.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import kernels
from .errors import CorruptMessageError, DisagreementError
from .randomness import checksum_int, fold, join, signed
from .segments import Segments

MAGIC = b"SPWR"
VERSION = 6
_LAYOUT = struct.Struct("<4sHHIIqQQQQ")
CHECKSUM_BYTES = 8
HEADER_BYTES = _LAYOUT.size + CHECKSUM_BYTES
STATUS_BYTES = 16 + CHECKSUM_BYTES
FINE = -1
NEGOTIATION = 3  # what keeps talk before the choice apart; 1 and 2 are the two ways of shards

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
        return _bytes(data + _checksum(data))

    @staticmethod
    def unpack(data: Tensor, rank: int) -> Header:
        """The header that rank `rank` sent."""
        raw = data.cpu().numpy().tobytes()
        magic, version, _, sender, _, step, bucket, scheme, layout, length = _LAYOUT.unpack(
            raw[: _LAYOUT.size]
        )
        if (
            magic != MAGIC
            or sender != rank
            or raw[_LAYOUT.size :] != _checksum(raw[: _LAYOUT.size])
        ):
            raise DisagreementError(
                f"what arrived from rank {rank} is no header of sparsewire's: "
                f"does another program use the same process group, or another version of it?"
            )
        return Header(rank, step, bucket, scheme, layout, length, version)


def _checksum(data: bytes) -> bytes:
    """The checksum of a header, which no key is needed for."""
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    return struct.pack("<Q", checksum_int(words, 0))


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
    of every checksum.

    `is_negotiation`: it belongs to what ranks talk about before they choose.
    """

    step: int
    bucket: int
    scheme: int
    layout: int
    chunk: int = 0  # also of what is not cut
    is_negotiation: bool = False

    @property
    def common(self) -> int:
        """What the keys of all ranks are made of."""
        exchange = fold(self.step, self.bucket, self.scheme, self.layout)
        if self.is_negotiation:
            exchange = fold(exchange, NEGOTIATION)
        return join(exchange, self.chunk) if self.chunk else exchange

    @property
    def status(self) -> Context:
        """The context of the status, in which the layout does not count: ranks that exchange
        different parameters may compare their status."""
        return replace(self, layout=0)

    def key(self, rank: int) -> int:
        """What the checksum of this rank's message is keyed with."""
        return join(self.common, rank)


REASONS = (
    "its checksum does not match",
    "its indices are not ascending, unique and in range",
    "it holds values that are not finite",
    "its length is not what the scheme says",
)
CHECKSUM, VALUES = 0, 2


def bytes_with_checksum(nbytes: int) -> int:
    """The size of something of `nbytes` with a checksum behind it, at a multiple of eight."""
    return -(-nbytes // 8) * 8 + CHECKSUM_BYTES


def add_checksum(message: Tensor, key: int) -> Tensor:
    """The message, whose last bytes become a checksum of all others."""
    body = message[:-CHECKSUM_BYTES]
    checksum = kernels.on(message.device).checksum(body, key)
    message[-CHECKSUM_BYTES:] = checksum.view(1).view(torch.uint8)
    return message


def matches_checksum(message: Tensor, key: int) -> Tensor:
    """Whether the checksum is that of the message."""
    body, checksum = message[:-CHECKSUM_BYTES], message[-CHECKSUM_BYTES:].view(torch.int64)
    return kernels.on(message.device).checksum(body, key) == checksum[0]


def corruption_code(sender: int, reason: int) -> int:
    """What is wrong with a message, and whose it is, as one number; `FINE` if nothing is."""
    return sender * len(REASONS) + reason


def first_corruption(findings: Tensor) -> Tensor:
    """The corruption code of the first message that is not fine; `findings` say whether each one
    is, in every one of `REASONS`."""
    worst = findings.view(torch.uint8).view(-1).min(0)  # rank by rank, as the codes are
    return torch.where(worst.values == 0, worst.indices, FINE)


def first_mismatch(matches: Tensor) -> Tensor:
    """The corruption code of the first rank that has a checksum which does not match."""
    worst = matches.view(torch.uint8).min(0)
    return torch.where(worst.values == 0, worst.indices * len(REASONS) + CHECKSUM, FINE)


def pack_status(corruption: Tensor, non_finite: Tensor, key: int) -> Tensor:
    """What a rank found, as `STATUS_BYTES`: a corruption code, and a bad parameter."""
    words = torch.stack([corruption, non_finite, corruption]).view(torch.uint8)
    return add_checksum(words, key)


def check_statuses(statuses: Tensor, context: Context) -> dict[int, int]:
    """Raise on all ranks if any found corruption; else the first bad parameter of each rank that
    has one.

    Raises on the rank alone whose copy of a status does not match its checksum: nobody else knows.
    """
    where = f"at step {context.step}, bucket {context.bucket}"
    words = statuses.view(torch.int64).tolist()
    for sender, (corruption, non_finite, checksum) in enumerate(words):
        key = context.status.key(sender)
        if checksum != signed(checksum_int([corruption & _MASK, non_finite & _MASK], key)):
            raise CorruptMessageError(
                f"the status of rank {sender} {where}: {REASONS[CHECKSUM]}, or the ranks are not "
                f"at the same step. This rank did not take the step and its memory did not change"
            )
    bad = {rank: non_finite for rank, (_, non_finite, _) in enumerate(words) if non_finite != FINE}
    if bad:
        return bad  # whose messages may well be called corrupt
    for receiver, (corruption, _, _) in enumerate(words):
        if corruption != FINE:
            sender, reason = divmod(corruption, len(REASONS))
            raise CorruptMessageError(
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
    """64 bits that differ when names, order, shapes or the residual's type do."""
    return fingerprint(str(dtype), *(f"{s.name}:{s.shape}" for s in segments.params))
