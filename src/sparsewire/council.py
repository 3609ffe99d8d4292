"""Where the ranks of one exchange talk about a choice before they make it.

What is said is sealed under a key of its own, so that nothing else passes for it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import kernels
from .collectives import Reduce, Request, Show, Total
from .desk import Call
from .message import FINE, REASONS, first_damage, seal

if TYPE_CHECKING:
    from .engine import Exchange


@dataclass
class Council:
    """One rank's seat: adds numbers up over all ranks, and names coordinates or hears them.

    What arrives damaged is remembered in `damage`, and something harmless stands in for it.
    """

    exchange: Exchange
    call: Call
    device: torch.device

    def __post_init__(self) -> None:
        self._leader = self.call.step % self.call.world
        self.leads = self.call.rank == self._leader
        self._context = replace(self.exchange.context(self.call), is_ahead=True)
        self.damage = torch.full((), FINE, device=self.device)

    def add_up(self, numbers: Tensor) -> Generator[Request, Any, Tensor]:
        total: Total = yield Reduce(numbers, numbers.dtype, self._context)
        self.damage = total.damage
        return total.values

    def name(self, indices: Tensor) -> Generator[Request, Any, None]:
        segments = self.exchange.segments
        written = self.exchange.scheme.indices.encode(indices, segments)
        message = self._blank()
        message[: written.numel()] = written
        yield Show(seal(message, self._context.key(self._leader)), self._leader)

    def hear(self) -> Generator[Request, Any, Tensor]:
        message: Tensor = yield Show(self._blank(), self._leader)
        segments, codec = self.exchange.segments, self.exchange.scheme.indices
        indices = codec.decode(message[: codec.nbytes(segments)], segments)
        found = kernels.on(self.device).inspect(
            [message],
            [(indices, torch.empty(0, device=self.device))],
            self._context.common,
            self._leader,
            self.exchange.notice_bytes,
            segments.size,
        )
        damage = first_damage(found)
        is_fine = damage == FINE
        self.damage = torch.where(is_fine, FINE, damage + self._leader * len(REASONS))
        table = segments.table(self.device)
        return torch.where(is_fine, indices, table.starts[table.owner] + table.place)

    def _blank(self) -> Tensor:
        """Room for the leader's message."""
        return torch.zeros(self.exchange.notice_bytes, dtype=torch.uint8, device=self.device)
