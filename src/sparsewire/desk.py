"""Writing one rank's message, reading everybody's, and putting the mean into the gradient.

Nothing that arrives is believed: every message is checked from its digest to its last value, and
all ranks agree on whether all of them were fine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import kernels
from .collectives import Gather, Talk, Total
from .message import (
    FINE,
    VALUES,
    Context,
    damage_code,
    first_damage,
    is_sealed,
    pack_verdict,
    seal,
    settle,
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


def finite(values: Tensor) -> Tensor:
    """Whether all values are; the largest magnitude tells, and is NaN if any of them is."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    return values.abs().amax().isfinite()


@dataclass
class Desk:
    """Writes and reads the messages of one exchange, and writes the mean into the gradient.

    What it finds stays on the gradient's device. On the CPU it is looked at before the gradient
    changes; elsewhere that would mean to wait for the device, so `settle` looks at it afterwards.
    """

    exchange: Exchange
    gradient: Tensor
    ledger: Tensor
    call: Call
    meter: Meter
    unsound: Tensor

    def __post_init__(self) -> None:
        self.share = 1 / self.call.world
        self.context: Context = self.exchange.context(self.call)
        self._damage = torch.full_like(self.unsound, FINE)
        self._verdicts: Sequence[Tensor] = ()

    def write(self, indices: Tensor, values: Tensor) -> Tensor:
        with self.meter.stage("encode"):
            exchange = self.exchange
            split, end = exchange.index_bytes, exchange.index_bytes + exchange.value_bytes
            message = torch.empty(
                exchange.message_bytes, dtype=torch.uint8, device=self.gradient.device
            )
            message[split:end] = self._encode(indices, values)
            message[:split] = exchange.scheme.indices.encode(indices, exchange.segments)
            message[end : end + exchange.padding_bytes] = 0
            return seal(message, self.context.key(self.call.rank))

    def read(self, messages: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        with self.meter.stage("decode"):
            opened = [self.open(message, rank) for rank, message in enumerate(messages)]
            self._remember(first_damage([findings for _, _, findings in opened]))
            return [(indices, values) for indices, values, _ in opened]

    def open(self, message: Tensor, rank: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Indices and values of one message, and whether it is fine in every one of `REASONS`."""
        scheme, segments = self.exchange.scheme, self.exchange.segments
        fine = torch.ones((), dtype=torch.bool, device=message.device)
        if message.numel() != self.exchange.message_bytes:
            nothing = message.new_empty(0)
            return nothing, nothing, [fine, fine, fine, ~fine]
        split = self.exchange.index_bytes
        end = split + self.exchange.value_bytes
        rises = fine
        if scheme.indices.written:
            indices = scheme.indices.decode(message[:split], segments)
            rises = kernels.on(message.device).is_ascending(indices, segments.size)
        else:
            draw = Draw(scheme.seed, self.call.step, rank)
            indices = scheme.selector.coordinates(segments, draw, message.device)
        place = Place(indices, segments, self._key(rank))
        values = scheme.values.decode(message[split:end], place, self.ledger.dtype)
        sealed = is_sealed(message, self.context.key(rank))
        return indices, values, [sealed, rises, finite(values), fine]

    def check(self, total: Total) -> Tensor:
        self._remember(total.damage)
        self._remember(torch.where(finite(total.values), FINE, damage_code(self.call.rank, VALUES)))
        return total.values

    def _remember(self, damage: Tensor) -> None:
        """Keep the first damage."""
        self._damage = torch.where(self._damage == FINE, damage, self._damage)

    def agree(self) -> Talk:
        key = self.context.key(self.call.rank)
        self._verdicts = yield Gather(pack_verdict(self._damage, self.unsound, key))
        if self.gradient.device.type == "cpu":
            self.settle()

    def settle(self) -> dict[int, int]:
        """Raise if any rank found damage; else the first bad span of each rank that has one."""
        return settle(self._verdicts, self.context)

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
            error = values - codec.decode(data, place, values.dtype)
            kernels.on(error.device).put_back(self.ledger, indices, error, segments)
        return data

    def _key(self, rank: int) -> int:
        return Draw(self.exchange.scheme.seed, self.call.step, rank).key(shared=False)
