"""Writing one rank's message, reading everybody's, and putting the mean into the gradient.

Nothing that arrives is believed: every message is checked from its digest to its last value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import kernels
from .collectives import Total
from .kernels.reference import finite
from .message import (
    DIGEST_BYTES,
    FINE,
    REASONS,
    VALUES,
    Context,
    damage_code,
    first_damage,
    seal,
)
from .meter import Meter
from .selectors import Draw
from .values import Place

if TYPE_CHECKING:
    from .engine import Exchange


@dataclass(frozen=True)
class Call:
    """Which exchange this is: the `step` and `bucket`, on `rank` of `world`.

    `opens`: it is the first one of its step.
    """

    step: int
    rank: int
    world: int
    bucket: int = 0
    opens: bool = True


@dataclass
class Desk:
    """Writes and reads the messages of one exchange, and writes the mean into the gradient.

    What it finds wrong, in `damage`, stays on the gradient's device: the ranks compare it when the
    step is over, and the mean is written without waiting for that.
    """

    exchange: Exchange
    gradient: Tensor
    ledger: Tensor
    call: Call
    meter: Meter

    def __post_init__(self) -> None:
        self.share = 1 / self.call.world
        self.context: Context = self.exchange.context(self.call)
        self.damage = torch.full((), FINE, device=self.gradient.device)
        self._own: tuple[Tensor, Tensor] | None = None  # what this rank wrote, as others read it

    def write(self, indices: Tensor, values: Tensor) -> Tensor:
        with self.meter.stage("encode"):
            exchange = self.exchange
            data = self._encode(indices, values)
            places = exchange.scheme.indices.encode(indices, exchange.segments)
            rest = data.new_zeros(exchange.padding_bytes + DIGEST_BYTES)
            return seal(torch.cat([places, data, rest]), self.context.key(self.call.rank))

    def read(self, messages: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        with self.meter.stage("decode"):
            own = self.call.rank if self._own is not None else len(messages)
            entries = [
                self._own if self._own is not None and rank == own else self._entries(message, rank)
                for rank, message in enumerate(messages)
            ]
            fine = torch.ones(1, len(REASONS), dtype=torch.bool, device=self.gradient.device)
            left = self._inspect(messages[:own], entries[:own], 0)
            right = self._inspect(messages[own + 1 :], entries[own + 1 :], own + 1)
            self._remember(first_damage(torch.cat([left, fine, right])))
            return entries

    def open(self, message: Tensor, rank: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Indices and values of one message, and whether it is fine in every one of `REASONS`."""
        entries = self._entries(message, rank)
        return *entries, list(self._inspect([message], [entries], rank)[0])

    def _inspect(
        self, messages: Sequence[Tensor], entries: Sequence[tuple[Tensor, Tensor]], first: int
    ) -> Tensor:
        exchange = self.exchange
        if not messages:
            return torch.empty(0, len(REASONS), dtype=torch.bool, device=self.gradient.device)
        if not exchange.scheme.indices.written:
            entries = [(indices[:0], values) for indices, values in entries]
        return kernels.on(self.gradient.device).inspect(
            messages,
            entries,
            self.context.common,
            first,
            exchange.message_bytes,
            exchange.segments.size,
        )

    def _entries(self, message: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        scheme, segments = self.exchange.scheme, self.exchange.segments
        if message.numel() != self.exchange.message_bytes:
            nothing = message.new_empty(0)
            return nothing, nothing
        split = self.exchange.index_bytes
        end = split + self.exchange.value_bytes
        if scheme.indices.written:
            indices = scheme.indices.decode(message[:split], segments)
        else:
            draw = Draw(scheme.seed, self.call.step, rank)
            indices = scheme.selector.coordinates(segments, draw, message.device)
        place = Place(indices, segments, self._key(rank))
        values = scheme.values.decode(message[split:end], place, self.ledger.dtype)
        return indices, values

    def check(self, total: Total) -> Tensor:
        with self.meter.stage("decode"):
            self._remember(total.damage)
            overflow = damage_code(self.call.rank, VALUES)
            self._remember(torch.where(finite(total.values), FINE, overflow))
            return total.values

    def _remember(self, damage: Tensor) -> None:
        """Keep the first damage."""
        self.damage = torch.where(self.damage == FINE, damage, self.damage)

    def narrow(self, indices: Tensor, values: Tensor) -> Tensor:
        with self.meter.stage("encode"):
            return self._encode(indices, values).view(self.exchange.scheme.values.dtype)

    def apply(self, entries: Sequence[tuple[Tensor, Tensor]], share: float) -> None:
        with self.meter.stage("decode"):
            kernel = kernels.on(self.gradient.device)
            kernel.add_up(self.gradient, entries, share, self.exchange.segments)

    def _encode(self, indices: Tensor, values: Tensor) -> Tensor:
        """Values as bytes; what the codec changed goes back into the ledger."""
        codec, segments = self.exchange.scheme.values, self.exchange.segments
        place = Place(indices, segments, self._key(self.call.rank))
        data = codec.encode(values, place)
        if not codec.exact(values.dtype):
            read = codec.decode(data, place, values.dtype)
            kernels.on(read.device).put_back(self.ledger, indices, values - read, segments)
            values = read
        self._own = (indices, values)
        return data

    def _key(self, rank: int) -> int:
        return Draw(self.exchange.scheme.seed, self.call.step, rank).key(shared=False)
