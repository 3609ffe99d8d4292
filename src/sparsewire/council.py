"""Where the ranks of one exchange talk about a choice before they make it.

What is said is sealed under a key of its own, so that nothing else passes for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import kernels
from .collectives.sums import sum_over_ranks
from .desk import Call
from .indices import Bitmap, IndexCodec
from .message import FINE, REASONS, Context, first_damage, seal
from .requests import Routine, all_gather, broadcast
from .segments import Segments
from .workspace import Workspace


@dataclass
class Council:
    """One rank's seat: adds numbers up over all ranks, names coordinates and hears them.

    What arrives damaged is remembered in `damage`, and something harmless stands in for it.
    """

    codec: IndexCodec
    segments: Segments
    notice: Segments  # the pieces, with as many coordinates as this rank may name
    nbytes: int  # of a message that names them
    context: Context
    call: Call
    device: torch.device
    work: Workspace

    def __post_init__(self) -> None:
        call, self.world = self.call, self.call.world
        self._leader = call.step % self.world
        self.turn = (call.rank - call.step) % self.world
        self.damage = torch.full((), FINE, device=self.device)

    def add_up(self, numbers: Tensor) -> Routine[Tensor]:
        total = yield from sum_over_ranks(
            numbers, numbers.dtype, self.context, self.call.rank, self.world, self.work
        )
        self.damage = total.damage
        return total.values

    def name(self, indices: Tensor) -> Routine[None]:
        yield broadcast(self._written(indices), self._leader)

    def hear(self) -> Routine[Tensor]:
        message: Tensor = yield broadcast(self._blank(), self._leader)
        (indices,), (is_fine,) = self._read([message], self._leader)
        table = self.notice.table(self.device)
        return torch.where(is_fine, indices, table.starts[table.owner] + table.place)

    def pool(self, indices: Tensor) -> Routine[Tensor]:
        messages: Sequence[Tensor] = yield all_gather(self._written(indices))
        named, are_fine = self._read(messages, 0)
        segments = self.segments
        sound = torch.where(are_fine[:, None], named, segments.size)
        # flags forget who named a coordinate, how often, and in which order; if there are more than
        # slots, because somebody named too many, the last ones are left out
        flags = Bitmap().encode(sound.flatten(), segments)
        return Bitmap().decode(flags, segments).clamp(max=segments.size)

    def _written(self, indices: Tensor) -> Tensor:
        """This rank's message."""
        written = self.codec.encode(indices, self.notice)
        message = self._blank()
        message[: written.numel()] = written
        return seal(message, self.context.key(self.call.rank))

    def _blank(self) -> Tensor:
        """Room for a message."""
        return torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)

    def _read(self, messages: Sequence[Tensor], first: int) -> tuple[Tensor, Tensor]:
        """The coordinates in the messages of ranks from `first` on, a row each, and for each
        message whether it is fine."""
        nbytes = self.codec.nbytes(self.notice)
        named = [self.codec.decode(message[:nbytes], self.notice) for message in messages]
        nothing = torch.empty(0, device=self.device)
        found = kernels.on(self.device).inspect(
            messages,
            [(indices, nothing) for indices in named],
            self.context.common,
            first,
            self.nbytes,
            self.notice.size,
        )
        damage = first_damage(found)
        self.damage = torch.where(damage == FINE, FINE, damage + first * len(REASONS))
        return torch.stack(named), found.all(dim=1)
