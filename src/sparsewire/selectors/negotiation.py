"""What ranks tell each other before they select, so that all select the same coordinates.

Its messages have checksums with a key of their own, so that nothing else passes for them.
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
    """The sizes of what `world_size` ranks tell each other before they select.

    Arguments:
        world_size: how many ranks there are.
        proposal: the layout of a message that proposes coordinates; None if nobody proposes any.
        led: only the leader proposes, which is rank `step mod world_size`; otherwise all ranks do.
        added: how many numbers all ranks add up.
    """

    world_size: int
    proposal: ProposalLayout | None = None
    led: bool = False
    added: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that one rank has to tell: numbers to add up, or proposed coordinates."""
        return 4 * self.added + (self.proposal.nbytes if self.proposal else 0)

    @property
    def traffic(self) -> int:
        """Bytes that each rank sends, on average."""
        added = reduce_traffic(self.added, 4, 4, self.world_size) if self.added else 0
        if self.proposal is None:
            return added
        carried = broadcast_traffic if self.led else gather_traffic
        return added + carried(self.proposal.nbytes, self.world_size)


@dataclass
class Negotiation:
    """One rank's part in a negotiation.

    What arrives corrupt is noted in `corruption`, and something harmless takes its place.
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
        """The segments, with as many coordinates as this rank may propose."""
        return self._layout.segments

    @property
    def _layout(self) -> ProposalLayout:
        assert self.plan.proposal is not None
        return self.plan.proposal

    def add_up(self, numbers: Tensor) -> Routine[Tensor]:
        """Return the sum of all ranks' numbers, in rank order: the same bits everywhere."""
        total = yield from sum_over_ranks(
            numbers, numbers.dtype, self.context, self.rank, self.world_size, self.work
        )
        self.corruption = total.corruption
        return total.values

    def propose(self, indices: Tensor) -> Routine[None]:
        """As leader: tell all others these coordinates, which fill the slots of `segments`."""
        message = self._layout.pack(indices, self.context.key(self.rank))
        yield broadcast(message, self.leader)

    def receive(self) -> Routine[Tensor]:
        """Return the coordinates that the leader proposes; harmless ones if they are corrupt."""
        message: Tensor = yield broadcast(self._layout.blank(self.device), self.leader)
        (indices,), (is_fine,) = self._read([message], self.leader)
        table = self.segments.table(self.device, self.work)
        return torch.where(is_fine, indices, table.starts[table.owner] + table.place)

    def unite(self, indices: Tensor, segments: Segments) -> Routine[Tensor]:
        """Propose coordinates, and return what any rank proposes: ascending, each once.

        The result has as many entries as messages of `segments` have slots, padded at the end.
        Proposals that arrive corrupt are left out.
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
        """Return the coordinates in the messages of ranks from `first` on, a row each, and
        whether each message is fine."""
        rows, found = self._layout.read(messages, self.context.common, first)
        corruption = first_corruption(found)
        self.corruption = torch.where(corruption == FINE, FINE, corruption + first * len(REASONS))
        return rows, found.all(dim=1)
