"""The wire format: a header of fixed size, the payload whose size it announces, and a status.

Headers are compared before any payload of a step is sent, because backends abort or mix up messages
of unequal length. Sizes follow from scheme and segments and are known before anything is sent.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from . import kernels
from .errors import CorruptMessageError, DisagreementError, ExchangeError
from .randomness import checksum_int, fold, join, signed
from .requests import GroupName, Routine, all_gather
from .segments import Segments

MAGIC = b"SPWR"
VERSION = 6
_LAYOUT = struct.Struct("<4sHHIIqQQQQ")
CHECKSUM_BYTES = 8
HEADER_BYTES = _LAYOUT.size + CHECKSUM_BYTES
STATUS_BYTES = 16 + CHECKSUM_BYTES
FINE = -1
# purposes of messages other than the payload; 1 and 2 are the two directions of shards
NEGOTIATION, USE, INTRA_NODE, BUFFERS, SAMPLE = 3, 4, 5, 6, 7

_FIELDS = {
    "version": "the version of sparsewire's wire format",
    "step": "the step",  # before the scheme, which may depend on it
    "bucket": "which bucket comes next",
    "scheme": "the scheme, or on attach's options",
    "layout": "the parameters' names, order, shapes or types",
    "length": "the length of the message",
}


@dataclass(frozen=True)
class Header:
    """A rank's description of its next message, which the ranks compare before they send it.

    `odd_local` is what the ranks of the sender's machine disagree on, as `local_difference` returns
    it; 0 if they agree.
    """

    rank: int
    step: int
    bucket: int
    scheme: int
    layout: int
    length: int
    version: int = VERSION
    odd_local: int = 0

    def pack(self) -> Tensor:
        """Return the header as a uint8 tensor of `HEADER_BYTES` bytes."""
        data = _LAYOUT.pack(
            MAGIC,
            self.version,
            0,
            self.rank,
            self.odd_local,
            self.step,
            self.bucket,
            self.scheme,
            self.layout,
            self.length,
        )
        return _bytes(data + _checksum(data))

    @staticmethod
    def unpack(data: Tensor, rank: int, who: str = "rank") -> Header:
        """Return the header that a rank sent. Raises on this rank only if it arrived corrupt."""
        raw = data.cpu().numpy().tobytes()
        magic, version, _, sender, odd_local, step, bucket, scheme, layout, length = _LAYOUT.unpack(
            raw[: _LAYOUT.size]
        )
        if (
            magic != MAGIC
            or sender != rank
            or raw[_LAYOUT.size :] != _checksum(raw[: _LAYOUT.size])
        ):
            raise ExchangeError(
                f"what arrived from {who} {rank} is no header of sparsewire's: it is corrupt, or "
                f"another program or version uses the same process group. The other ranks may have "
                f"continued, so the group is broken: restart all ranks from a checkpoint"
            )
        return Header(rank, step, bucket, scheme, layout, length, version, odd_local)


def _checksum(data: bytes) -> bytes:
    """Return the checksum of a header, whose key is 0."""
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    return struct.pack("<Q", checksum_int(words, 0))


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def gather_headers(
    own: Header, group: GroupName = "exchange", who: str = "rank", first: int = 0
) -> Routine[list[Header]]:
    """Return the headers of all ranks of a group, which are numbered from `first` on. Errors call
    its members `who`."""
    answers: Sequence[Tensor] = yield all_gather(own.pack(), group=group)
    return [Header.unpack(data, rank, who) for rank, data in enumerate(answers, first)]


def _difference(headers: Sequence[Header]) -> tuple[str, list[int], int] | None:
    """Return the first field in which headers differ, the ranks in the minority, and the value of
    the others."""
    for name in _FIELDS:
        said = [getattr(header, name) for header in headers]
        usual, votes = Counter(said).most_common(1)[0]
        if votes < len(said):
            return name, [rank for rank, value in enumerate(said) if value != usual], usual
    return None


def local_difference(headers: Sequence[Header]) -> int:
    """Return what the ranks of a machine disagree on, as a number above 0; 0 if they agree."""
    found = _difference(headers)
    if found is None:
        return 0
    name, odd, _ = found
    return 1 + odd[0] * len(_FIELDS) + list(_FIELDS).index(name)


def compare(headers: Sequence[Header], own: Header, scheme: str, who: str = "rank") -> None:
    """Raise unless all headers agree. All ranks raise the same error."""
    where = (
        f"at step {own.step}, bucket {own.bucket}; this is {who} {own.rank} with {scheme}. All "
        f"ranks must run the same code, model and scheme"
    )
    for header in headers:
        if header.odd_local:
            rank, field = divmod(header.odd_local - 1, len(_FIELDS))
            raise DisagreementError(
                f"rank {rank} of machine {header.rank} disagrees with the others of its machine on "
                f"{list(_FIELDS.values())[field]}, {where}"
            )
    found = _difference(headers)
    if found is None:
        return
    name, odd, usual = found
    names = f"{who} {odd[0]}" if len(odd) == 1 else f"{who}s {', '.join(map(str, odd))}"
    given = getattr(headers[odd[0]], name)
    detail = "" if name in ("scheme", "layout") else f" ({given} instead of {usual})"
    raise DisagreementError(
        f"{names} of {len(headers)} disagree{'s' if len(odd) == 1 else ''} with the others on "
        f"{_FIELDS[name]}{detail}, {where}"
    )


@dataclass(frozen=True)
class Context:
    """Which exchange a message belongs to, and which chunk of a sum. It is not sent, but is part of
    every checksum.

    `purpose` is the kind of message, if it is not the payload, and `machine` is the number of the
    machine for messages inside one.
    """

    step: int
    bucket: int
    scheme: int
    layout: int
    chunk: int = 0  # also for what is not divided into chunks
    purpose: int = 0
    machine: int | None = None

    @cached_property
    def common(self) -> int:
        """The part of the key that is the same for all ranks."""
        exchange = fold(self.step, self.bucket, self.scheme, self.layout)
        if self.purpose:
            exchange = fold(exchange, self.purpose)
        if self.machine is not None:
            exchange = join(exchange, self.machine)
        return join(exchange, self.chunk) if self.chunk else exchange

    @cached_property
    def status(self) -> Context:
        """The context of the status, without the layout: ranks that exchange different parameters
        may compare their statuses."""
        return replace(self, layout=0)

    def key(self, rank: int) -> int:
        """Return the key of the checksum of a rank's message."""
        return join(self.common, rank)


REASONS = (
    "its checksum does not match",
    "its indices are not ascending, unique and in range",
    "it holds values that are not finite",
    "its length is not what the scheme says",
)
CHECKSUM, VALUES = 0, 2


def bytes_with_checksum(nbytes: int) -> int:
    """Return the size of `nbytes`, padded to a multiple of eight, with a checksum."""
    return -(-nbytes // 8) * 8 + CHECKSUM_BYTES


def add_checksum(message: Tensor, key: int) -> Tensor:
    """Overwrite the last bytes of a message by the checksum of the others, and return it."""
    body = message[:-CHECKSUM_BYTES]
    checksum = kernels.on(message.device).checksum(body, key)
    message[-CHECKSUM_BYTES:] = checksum.view(1).view(torch.uint8)
    return message


def matches_checksum(message: Tensor, key: int) -> Tensor:
    """Return whether the checksum of a message is right."""
    body, checksum = message[:-CHECKSUM_BYTES], message[-CHECKSUM_BYTES:].view(torch.int64)
    return kernels.on(message.device).checksum(body, key) == checksum[0]


def add_checksum_to(payload: Tensor, key: int) -> Tensor:
    """Return a message of these bytes and their checksum."""
    message = payload.new_zeros(bytes_with_checksum(payload.numel()))
    message[: payload.numel()] = payload
    return add_checksum(message, key)


def gather_checked(
    payload: Tensor, context: Context, rank: int, group: GroupName = "exchange"
) -> Routine[tuple[list[Tensor], Tensor]]:
    """Return the bytes of all ranks, and the corruption code of the first corrupt message."""
    message = add_checksum_to(payload, context.key(rank))
    messages: Sequence[Tensor] = yield all_gather(message, group=group)
    matches = [matches_checksum(each, context.key(sender)) for sender, each in enumerate(messages)]
    return [each[: payload.numel()] for each in messages], first_mismatch(torch.stack(matches))


def corruption_code(sender: int, reason: int) -> int:
    """Return the number for what is wrong with a rank's message; `FINE` means nothing is."""
    return sender * len(REASONS) + reason


def local_corruption_code(sender: int, receiver: int) -> int:
    """Return the same for a message between two ranks of one machine."""
    return FINE - 1 - (receiver * _LOCAL_RANKS + sender)


_LOCAL_RANKS = 1 << 16  # more than any machine has


def first_corruption(findings: Tensor) -> Tensor:
    """Return the corruption code of the first corrupt message.

    `findings` says whether each message passes each check of `REASONS`.
    """
    worst = findings.view(torch.uint8).view(-1).min(0)  # rank by rank, as the codes are
    return torch.where(worst.values == 0, worst.indices, FINE)


def first_mismatch(matches: Tensor) -> Tensor:
    """Return the corruption code of the first rank whose checksum does not match."""
    worst = matches.view(torch.uint8).min(0)
    return torch.where(worst.values == 0, worst.indices * len(REASONS) + CHECKSUM, FINE)


def pack_status(corruption: Tensor, non_finite: Tensor, key: int) -> Tensor:
    """Return a status of `STATUS_BYTES`: a corruption code, and the number of a bad parameter."""
    words = torch.stack([corruption, non_finite, corruption]).view(torch.uint8)
    return add_checksum(words, key)


def check_statuses(statuses: Tensor, context: Context, who: str = "rank") -> dict[int, int]:
    """Return the first bad parameter of each rank that has one. Raise on all ranks if any rank
    found a corrupt message.

    If a status itself arrived corrupt, only this rank raises, which breaks the group: it cannot
    know what the others decided.
    """
    where = f"at step {context.step}, bucket {context.bucket}"
    words = statuses.view(torch.int64).tolist()
    for sender, (corruption, non_finite, checksum) in enumerate(words):
        key = context.status.key(sender)
        if checksum != signed(checksum_int([corruption & _MASK, non_finite & _MASK], key)):
            raise ExchangeError(
                f"the status of {who} {sender} {where}: {REASONS[CHECKSUM]}, or the ranks are not "
                f"at the same step. The other ranks may have taken the step, so the group is "
                f"broken: restart all ranks from a checkpoint"
            )
    bad = {rank: non_finite for rank, (_, non_finite, _) in enumerate(words) if non_finite != FINE}
    if bad:
        return bad  # the messages of these ranks may count as corrupt as well
    found = [(receiver, code) for receiver, (code, _, _) in enumerate(words) if code != FINE]
    if found:
        # a sum of corrupt shares may not be finite, on ranks to which nothing else arrived corrupt
        receiver, code = min(found, key=lambda each: _is_of_values(each[1]))
        raise CorruptMessageError(
            f"{_corruption_text(code, receiver, where, who)}. No rank took the step, "
            f"and no residual changed"
        )
    return {}


def _is_of_values(code: int) -> bool:
    return code > FINE and code % len(REASONS) == VALUES


def _corruption_text(code: int, receiver: int, where: str, who: str) -> str:
    """Return which message a code in the status of `receiver` stands for, and what is wrong."""
    if code < FINE:
        local, sender = divmod(FINE - 1 - code, _LOCAL_RANKS)
        return (
            f"the message of rank {sender} of machine {receiver} that rank {local} of the same "
            f"machine received {where}: {REASONS[CHECKSUM]}"
        )
    sender, reason = divmod(code, len(REASONS))
    names = f"{who} {sender} that {who} {receiver}"
    return f"the message of {names} received {where}: {REASONS[reason]}"


_MASK = (1 << 64) - 1


def fingerprint(*texts: str) -> int:
    """Return 64 bits that depend on the texts."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(text.encode())
        digest.update(b"\0")
    return int.from_bytes(digest.digest(), "little")


def layout_fingerprint(segments: Segments, dtype: torch.dtype) -> int:
    """Return 64 bits that depend on names, order and shapes, and the residual's type."""
    return fingerprint(str(dtype), *(f"{s.name}:{s.shape}" for s in segments.params))
