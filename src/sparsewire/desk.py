"""Writing one rank's message, reading everybody's, and putting the mean into the gradient.

Nothing that arrives is believed: every message is checked from its checksum to its last value, and
all ranks agree that all of them were fine before any gradient changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .collectives import Gather, Talk
from .kernels import reference as kernels
from .message import (
    REASONS,
    Damage,
    Damaged,
    agree,
    check_indices,
    checksum,
    pack_verdict,
    seal,
    unseal,
)
from .meter import Meter
from .selectors import Draw
from .values import Place

if TYPE_CHECKING:
    from .engine import Exchange


@dataclass(frozen=True)
class Call:
    """Which exchange this is: the `step` and `bucket`, on `rank` of `world`."""

    step: int
    rank: int
    world: int
    bucket: int = 0


def finite(values: Tensor) -> bool:
    """Whether all values are; a norm tells fast, unless it overflows itself."""
    return bool(torch.linalg.vector_norm(values) < float("inf")) or bool(values.isfinite().all())


@dataclass
class Desk:
    """Writes and reads the messages of one exchange, and writes the mean into the gradient."""

    exchange: Exchange
    gradient: Tensor
    ledger: Tensor
    call: Call
    meter: Meter

    def __post_init__(self) -> None:
        self.share = 1 / self.call.world
        self._cleared = False
        self._damage: Damage | None = None

    @property
    def _where(self) -> tuple[int, int]:
        return self.call.step, self.call.bucket

    def write(self, indices: Tensor, values: Tensor) -> Tensor:
        with self.meter.stage("encode"):
            scheme = self.exchange.scheme
            data = self._encode(indices, values)
            padding = data.new_zeros(self.exchange.padding_bytes)
            written = scheme.indices.encode(indices, self.exchange.segments)
            return seal(torch.cat([written, data, padding]), self.call.rank, *self._where)

    def read(self, messages: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        entries = []
        with self.meter.stage("decode"):
            for rank, message in enumerate(messages):
                try:
                    entries.append(self.open(message, rank))
                except Damaged as damage:
                    self._damage = self._damage or Damage(rank, str(damage))
        return entries

    def open(self, message: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """One message, checked from its checksum to its last value."""
        scheme, segments = self.exchange.scheme, self.exchange.segments
        if message.numel() != self.exchange.message_bytes:
            raise Damaged(REASONS[4])
        body = unseal(message, rank, *self._where)
        split = self.exchange.index_bytes
        end = split + self.exchange.value_bytes
        try:
            if scheme.indices.written:
                indices = scheme.indices.decode(body[:split], segments)
                check_indices(indices, segments.size, segments.room)
            else:
                draw = Draw(scheme.seed, self.call.step, rank)
                indices = scheme.selector.coordinates(segments, draw, message.device)
            place = Place(indices, segments, self._key(rank))
            values = scheme.values.decode(body[split:end], place, self.ledger.dtype)
        except (RuntimeError, ValueError, IndexError) as error:
            raise Damaged(REASONS[3]) from error
        if not finite(values):
            raise Damaged(REASONS[2])
        return indices, values

    def agree(self, total: Tensor | None = None) -> Talk:
        digest = 0
        if total is not None:
            digest = checksum(total.view(torch.uint8), 0, *self._where)
            if not finite(total):
                self._damage = Damage(self.call.rank, REASONS[2])
        verdicts = yield Gather(pack_verdict(self._damage, digest))
        agree(verdicts, *self._where)

    def narrow(self, indices: Tensor, values: Tensor) -> Tensor:
        with self.meter.stage("encode"):
            return self._encode(indices, values).view(self.exchange.scheme.values.dtype)

    def add(self, indices: Tensor, values: Tensor) -> None:
        with self.meter.stage("decode"):
            if not self._cleared:
                self.gradient.zero_()
                self._cleared = True
            kernels.add_entries(self.gradient, indices, values, self.exchange.segments.whole_runs)

    def _encode(self, indices: Tensor, values: Tensor) -> Tensor:
        """Values as bytes; what the codec changed goes back into the ledger."""
        codec, segments = self.exchange.scheme.values, self.exchange.segments
        place = Place(indices, segments, self._key(self.call.rank))
        data = codec.encode(values, place)
        if not codec.exact(values.dtype):
            error = values - codec.decode(data, place, values.dtype)
            # without the spare slot: what was not sent anywhere has no error
            ledger = self.ledger[: segments.size]
            kernels.add_entries(ledger, indices, error, segments.whole_runs)
        return data

    def _key(self, rank: int) -> int:
        return Draw(self.exchange.scheme.seed, self.call.step, rank).key(shared=False)
