"""Selectors by which all ranks choose the same coordinates, though these depend on the gradient.

Ranks talk before they choose: little, and then no index travels with the values, which can be added
up on the way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import kernels
from ..codecs import IndexCodec
from ..errors import SchemeError
from ..kernels import Selection
from ..kernels.blocks import BlockTable
from ..layout import ProposalLayout
from ..randomness import RandomKey
from ..requests import Routine
from ..segments import Segments
from ..state import StepState
from ..workspace import Workspace
from .base import Accumulation, Coordination, Sized
from .negotiation import Negotiation, NegotiationPlan


@dataclass(frozen=True, repr=False)
class TopBlock(Sized):
    """The blocks of every segment that hold the most, summed over all ranks.

    Every segment is cut into blocks of `block` coordinates from its start on, and the last one may
    be shorter. All ranks add up the squared norms of their blocks, gradient and memory together,
    and the largest sums are chosen, equal ones from the left: `ratio` of the blocks (rounded up, at
    least one), or enough of them for `count` coordinates.

    With m of B blocks, over all ranks together and so for one alone:
    Σ‖x − C(x)‖² ≤ (1 − m/B) Σ‖x‖².

    Norms are float32: blocks with values beyond about 1e19, or with none above 1e-22, look alike,
    and those on the left go first.

    Arguments:
        ratio: the share of blocks sent.
        count: coordinates sent, rounded up to whole blocks.
        block: coordinates in a block. Longer ones cost accuracy, shorter ones cost bytes: a norm
            for every block, four bytes each way. With 128, norms cost a little less than values at
            1 %.

    >>> TopBlock(0.01, block=64).entries(10_000), TopBlock(count=100, block=64).entries(10_000)
    (128, 128)
    """

    block: int = 128
    coordination = Coordination.NEGOTIATED

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise SchemeError(
                f"TopBlock's block must be a whole number of at least 1, as in "
                f"TopBlock({self.ratio or 0.01}, block=64)"
            )

    def entries(self, length: int) -> int:
        return min(length, self.block * self._chosen(length))

    def capacity(self, length: int) -> int:
        return self.entries(length)

    def _chosen(self, length: int) -> int:
        """How many blocks of a segment are sent."""
        blocks = -(-length // self.block)
        if self.count is not None:
            return min(blocks, -(-self.count // self.block))
        assert self.ratio is not None
        # a hair above a whole number is that number
        return min(blocks, max(1, math.ceil(self.ratio * blocks * (1 - 1e-12))))

    def negotiation(
        self, indices: IndexCodec, segments: Segments, world_size: int
    ) -> NegotiationPlan | None:
        if not segments.sparse:
            return None
        blocks = sum(-(-segment.length // self.block) for segment in segments.sparse)
        return NegotiationPlan(world_size, added=blocks)

    def select(
        self,
        accumulation: Accumulation,
        segments: Segments,
        key: RandomKey,
        state: StepState,
        work: Workspace,
    ) -> Selection:
        device = accumulation.after.device
        if not segments.sparse:
            nothing = torch.empty(0, dtype=torch.int64, device=device)
            return kernels.on(device).chosen(*accumulation, segments, nothing, work)
        norms = self._norms(accumulation, segments, work)
        return self._take(norms, accumulation, segments, work)

    def negotiate(
        self,
        accumulation: Accumulation,
        segments: Segments,
        key: RandomKey,
        state: StepState,
        negotiation: Negotiation,
    ) -> Routine[Selection]:
        work = negotiation.work
        norms = yield from negotiation.add_up(self._norms(accumulation, segments, work))
        return self._take(norms, accumulation, segments, work)

    def _norms(self, accumulation: Accumulation, segments: Segments, work: Workspace) -> Tensor:
        before, addend, after = accumulation
        return kernels.on(after.device).block_norms(before, addend, segments, self.block, work)

    def _take(
        self, norms: Tensor, accumulation: Accumulation, segments: Segments, work: Workspace
    ) -> Selection:
        device = norms.device
        indices = kernels.on(device).top_blocks(norms, segments, self.block, work)
        selection = kernels.on(device).chosen(*accumulation, segments, indices, work)
        if not BlockTable.of(segments, self.block, device, work).is_ragged:
            return selection
        return replace(selection, count=(indices < segments.size).sum())

    def contraction(self, length: int) -> float:
        return self._chosen(length) / -(-length // self.block)


@dataclass(frozen=True, repr=False)
class _Named(Sized):
    """What those share whose ranks name their largest magnitudes: a rank alone does as `TopK`."""

    coordination = Coordination.NEGOTIATED

    def capacity(self, length: int) -> int:
        return self.entries(length)

    def select(
        self,
        accumulation: Accumulation,
        segments: Segments,
        key: RandomKey,
        state: StepState,
        work: Workspace,
    ) -> Selection:
        return kernels.on(accumulation.after.device).top_k(*accumulation, segments, work)

    def names(self, count: int, world_size: int) -> int:
        """Return how many coordinates each of `world_size` ranks may propose of `count`."""
        return count

    def negotiation(
        self, indices: IndexCodec, segments: Segments, world_size: int
    ) -> NegotiationPlan | None:
        if not segments.sparse:
            return None
        counts = [self.names(segment.count, world_size) for segment in segments.sparse]
        wanted = zip(segments.sparse, counts, strict=True)
        proposed = tuple(replace(segment, count=count, capacity=count) for segment, count in wanted)
        layout = ProposalLayout(indices, replace(segments, sparse=proposed))
        return NegotiationPlan(world_size, layout, led=self.proposers == "leader")

    def contraction(self, length: int) -> float:
        return self.entries(length) / length


@dataclass(frozen=True, repr=False)
class LeaderTopK(_Named):
    """The largest magnitudes of one rank, which takes turns: all ranks send what they have there.

    At step t rank t mod W leads. It names its largest magnitudes, as `TopK` chooses them, and only
    its indices travel besides the values. Good where ranks' memories are alike, as they are with
    large batches.

    For one rank ‖x − C(x)‖² ≤ (1 − k/n)‖x‖², and for the leader of many. For the others a step
    promises no more than ‖x − C(x)‖² ≤ ‖x‖².

    Reference: Chen et al. 2020, ScaleCom.
    """

    proposers = "leader"

    def negotiate(
        self,
        accumulation: Accumulation,
        segments: Segments,
        key: RandomKey,
        state: StepState,
        negotiation: Negotiation,
    ) -> Routine[Selection]:
        work = negotiation.work
        if negotiation.turn == 0:
            selection = self.select(accumulation, segments, key, state, work)
            yield from negotiation.propose(selection.indices)
            return selection
        indices = yield from negotiation.receive()
        return kernels.on(indices.device).chosen(*accumulation, segments, indices, work)


@dataclass(frozen=True, repr=False)
class UnionTopK(_Named):
    """The largest magnitudes of every rank, a share each: all ranks send what they have there.

    Where k coordinates of a segment are sent, each of W ranks names its k/W largest magnitudes;
    what that leaves over, k mod W, is named by as many of the ranks, who take turns. All ranks send
    their values at all of these. No rank waits for its turn to lead, as with `LeaderTopK`, and only
    the indices travel besides the values. What several ranks name is sent once, so there may be
    fewer than k.

    For one rank ‖x − C(x)‖² ≤ (1 − k/n)‖x‖², and for each of W, where k ≥ W, at least
    ‖x − C(x)‖² ≤ (1 − ⌊k/W⌋/n)‖x‖².

    >>> UnionTopK(0.01).entries(10_000), UnionTopK(0.01).names(100, world_size=8)
    (100, 13)
    """

    proposers = "all"

    def names(self, count: int, world_size: int) -> int:
        return -(-count // world_size)

    def negotiate(
        self,
        accumulation: Accumulation,
        segments: Segments,
        key: RandomKey,
        state: StepState,
        negotiation: Negotiation,
    ) -> Routine[Selection]:
        kernel, work = kernels.on(accumulation.after.device), negotiation.work
        own = kernel.top_k(*accumulation, negotiation.segments, work)
        named = yield from negotiation.unite(self._in_turn(own, segments, negotiation), segments)
        selection = kernel.chosen(*accumulation, segments, named, work)
        return replace(selection, count=(named < segments.size).sum())

    @staticmethod
    def _in_turn(own: Selection, segments: Segments, negotiation: Negotiation) -> Tensor:
        """The indices, without the smallest of each segment that enough others name one more of."""
        indices, device, work = own.indices, own.indices.device, negotiation.work
        said, sent = (each.table(device, work) for each in (negotiation.segments, segments))
        world_size, turn = negotiation.world_size, negotiation.turn
        is_enough = said.counts * world_size - sent.counts >= world_size - turn
        sizes = own.values[: indices.numel()].abs()
        least = torch.full_like(said.counts, torch.inf, dtype=sizes.dtype)
        least = least.scatter_reduce(0, said.owner, sizes, "amin")
        is_least = (sizes == least[said.owner]) & is_enough[said.owner]
        at = torch.where(is_least, torch.arange(indices.numel(), device=device), indices.numel())
        first = torch.full_like(said.counts, indices.numel()).scatter_reduce(
            0, said.owner, at, "amin"
        )
        longer = torch.cat([indices, indices[:1]])  # where nothing is left out, behind the last
        return longer.index_fill(0, first, segments.size)[:-1].sort().values
