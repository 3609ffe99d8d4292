"""Negotiation: the messages by which ranks agree on coordinates before they select.

Their checksums have a key of their own, so that no other message is mistaken for one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..codecs import Bitmap
from ..layout import ProposalLayout
from ..message import FINE, NEGOTIATION, REASONS, Context, first_corruption
from ..requests import Routine, all_gather, broadcast, broadcast_traffic, gather_traffic
from ..segments import Segments
from ..sums import reduce_traffic, sum_over_ranks
from ..workspace import Workspace


@dataclass(frozen=True)
class NegotiationPlan:
    """The sizes of a negotiation.

    Arguments:
        world_size: The number of ranks.
        proposal: The layout of a message that proposes coordinates; None if there is none.
        led: If True, only the leader proposes, which is rank `step mod world_size`. Otherwise all
            ranks do.
        added: How many numbers the ranks sum.
    """

    world_size: int
    proposal: ProposalLayout | None = None
    led: bool = False
    added: int = 0

    @property
    def nbytes(self) -> int:
        """The size of one rank's message, with numbers to sum or proposed coordinates."""
        return 4 * self.added + (self.proposal.nbytes if self.proposal else 0)

    @property
    def traffic(self) -> int:
        """The bytes that each rank sends, on average."""
        added = reduce_traffic(self.added, 4, 4, self.world_size) if self.added else 0
        if self.proposal is None:
            return added
        carried = broadcast_traffic if self.led else gather_traffic
        return added + carried(self.proposal.nbytes, self.world_size)


@dataclass
class Negotiation:
    """One rank's part in a negotiation.

    If a message arrives corrupt, a harmless default replaces it and `corruption` says so.

    Arguments:
        plan: The sizes.
        context: Which exchange this is; checksums are keyed by it.
        rank: This rank's number.
        device: The device of the gradient.
        work: This rank's workspace.
    """

    plan: NegotiationPlan
    context: Context
    rank: int
    device: torch.device
    work: Workspace

    def __post_init__(self) -> None:
        self.context = replace(self.context, purpose=NEGOTIATION)
        self.world_size = self.plan.world_size
        self.leader = self.context.step % self.world_size
        self.turn = (self.rank - self.leader) % self.world_size  # this rank's place; 0 leads
        self.corruption = torch.full((), FINE, device=self.device)

    @property
    def segments(self) -> Segments:
        """The segments, with the number of coordinates that this rank may propose."""
        return self._layout.segments

    @property
    def _layout(self) -> ProposalLayout:
        assert self.plan.proposal is not None
        return self.plan.proposal

    def add_up(self, numbers: Tensor) -> Routine[Tensor]:
        """Return the sum of all ranks' numbers, added in rank order: the same bits on all ranks."""
        total = yield from sum_over_ranks(
            numbers, numbers.dtype, self.context, self.rank, self.world_size, self.work
        )
        self.corruption = total.corruption
        return total.values

    def propose(self, indices: Tensor) -> Routine[None]:
        """Broadcast coordinates, which fill the slots of `segments`. Only the leader calls it."""
        message = self._layout.pack(indices, self.context.key(self.rank))
        yield broadcast(message, self.leader)

    def receive(self) -> Routine[Tensor]:
        """Return the coordinates that the leader broadcasts."""
        message: Tensor = yield broadcast(self._layout.blank(self.device), self.leader)
        (indices,), (is_fine,) = self._read([message], self.leader)
        table = self.segments.table(self.device, self.work)
        return torch.where(is_fine, indices, table.starts[table.owner] + table.place)

    def unite(self, indices: Tensor, segments: Segments) -> Routine[Tensor]:
        """Propose coordinates, and return the union of all ranks' proposals, ascending.

        The result has one entry for each slot of `segments`, padded at the end. Proposals that
        arrive corrupt are left out.
        """
        message = self._layout.pack(indices, self.context.key(self.rank))
        messages: Sequence[Tensor] = yield all_gather(message)
        proposed, are_fine = self._read(messages, 0)
        sound = torch.where(are_fine[:, None], proposed, segments.size)
        # flags forget who proposed a coordinate, how often, and in which order; if there are more
        # than slots, because somebody proposed too many, the last ones are left out
        flags = Bitmap().encode(sound.flatten(), segments)
        return Bitmap().decode(flags, segments).clamp(max=segments.size)

    def _read(self, messages: Sequence[Tensor], first: int) -> tuple[Tensor, Tensor]:
        """Return the coordinates in the messages of ranks from `first` on, one row each, and
        whether each message is fine."""
        rows, found = self._layout.read(messages, self.context.common, first)
        corruption = first_corruption(found)
        self.corruption = torch.where(corruption == FINE, FINE, corruption + first * len(REASONS))
        return rows, found.all(dim=1)
