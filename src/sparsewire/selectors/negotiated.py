"""Negotiated selectors: all ranks choose the same coordinates, which depend on the gradients.

Ranks exchange a small message before they select. Values then need no indices and can be summed in
transit.
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
    """Select the blocks of neighbouring coordinates with the largest norms over all ranks.

    Every segment is divided into blocks of `block` coordinates; the last block may be shorter. The
    ranks sum the squared norms of their blocks, gradient and residual together, and all of them
    select the blocks with the largest sums. Of equal sums, blocks at lower positions come first. No
    index is sent, and `AllReduce` sums the values. If a shorter last block is selected, the segment
    sends that many fewer coordinates.

    With m of B blocks Σ‖x − C(x)‖² ≤ (1 − m/B) Σ‖x‖², where Σ is the sum over all ranks.

    Norms are float32. Blocks with values above about 1e19, or with none above 1e-22, all look the
    same.

    Arguments:
        ratio: The share of the blocks to send, rounded up and at least one. 0.01 by default.
        count: The number of coordinates of each segment, rounded up to whole blocks, instead of a
            ratio.
        block: The number of coordinates in a block. Longer blocks cost accuracy, shorter ones cost
            bytes, since each norm takes as much as a float32 value. At 1 %, the norms cost more
            than the values if a block has fewer than 100 coordinates.
        min_count: With a ratio, send at least this many coordinates of each segment, so that small
            tensors are sent more densely than large ones.

    >>> import torch
    >>> import sparsewire as sw
    >>> scheme = sw.Scheme(sw.TopBlock(count=2, block=2), dense_below=0, dense_1d=False)
    >>> gradients = [{"w": torch.tensor(g)} for g in ([9.0, 0, 2, 2, 0, 0], [0.0, 0, 2, 2, 8, 8])]
    >>> states = [sw.functional.init(scheme, gradients[0]) for _ in range(2)]
    >>> mean, states = sw.functional.simulate(gradients, states)
    >>> mean["w"].tolist()
    [0.0, 0.0, 0.0, 0.0, 4.0, 4.0]
    >>> states[0].memory["w"]["residual"].tolist()
    [9.0, 0.0, 2.0, 2.0, 0.0, 0.0]
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
        """Return how many blocks to send of a segment."""
        blocks = -(-length // self.block)
        if self.count is not None:
            return min(blocks, -(-self.count // self.block))
        assert self.ratio is not None
        # a hair above a whole number is that number
        least = -(-self.min_count // self.block)
        return min(blocks, max(least, math.ceil(self.ratio * blocks * (1 - 1e-12))))

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
    """Base class of selectors in which ranks propose their largest magnitudes.

    With one rank it behaves like `TopK`.
    """

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
        """Return how many of `count` coordinates each of `world_size` ranks may propose.

        :meta private:
        """
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
    """Select the top-k coordinates of one rank, the leader, which changes at every step.

    At step t, rank t mod W is the leader. It broadcasts the indices of its largest magnitudes,
    encoded by the scheme's index codec, and `AllReduce` sums the values of all ranks there. The
    other ranks may have little at these coordinates, so it suits ranks with similar residuals, as
    with large batches.

    For the leader ‖x − C(x)‖² ≤ (1 − k/n)‖x‖²; for the others only ‖x − C(x)‖² ≤ ‖x‖².

    Arguments:
        ratio: The share of the coordinates to send. 0.01 by default.
        count: The number of coordinates to send of each segment, instead of a ratio.
        min_count: With a ratio, send at least this many coordinates of each segment, so that small
            tensors are sent more densely than large ones.

    >>> import torch
    >>> import sparsewire as sw
    >>> scheme = sw.Scheme(sw.LeaderTopK(count=1), dense_below=0, dense_1d=False)
    >>> states = [sw.functional.init(scheme, {"w": torch.zeros(3)}) for _ in range(2)]
    >>> gradients = [{"w": torch.tensor([6.0, 1.0, 2.0])}, {"w": torch.tensor([2.0, 1.0, 9.0])}]
    >>> for _ in range(2):
    ...     mean, states = sw.functional.simulate(gradients, states)
    ...     print(mean["w"].tolist())
    [4.0, 0.0, 0.0]
    [0.0, 0.0, 11.0]

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
    """Select the union of the largest magnitudes of all ranks, k/W from each.

    To send k coordinates of a segment, each of W ranks proposes its k/W largest magnitudes, encoded
    by the scheme's index codec. If k is not divisible by W, ranks take turns to propose one more.
    `AllReduce` then sums the values of all ranks at all proposed coordinates. The most urgent
    values of each rank leave at every step; with `LeaderTopK` they wait for the rank's turn.

    A coordinate that several ranks propose is sent once, so there may be fewer than k; `report()`
    shows how many. The bytes stay the same. With one rank it is `TopK`.

    For each rank ‖x − C(x)‖² ≤ (1 − ⌊k/W⌋/n)‖x‖², where k ≥ W.

    Arguments:
        ratio: The share of the coordinates to send, of all ranks together. 0.01 by default.
        count: The number of coordinates to send of each segment, instead of a ratio.
        min_count: With a ratio, send at least this many coordinates of each segment, so that small
            tensors are sent more densely than large ones.

    >>> import torch
    >>> import sparsewire as sw
    >>> scheme = sw.Scheme(sw.UnionTopK(count=2), dense_below=0, dense_1d=False)
    >>> states = [sw.functional.init(scheme, {"w": torch.zeros(3)}) for _ in range(2)]
    >>> gradients = [{"w": torch.tensor([6.0, 1.0, 2.0])}, {"w": torch.tensor([2.0, 1.0, 9.0])}]
    >>> mean, states = sw.functional.simulate(gradients, states)
    >>> mean["w"].tolist()
    [4.0, 0.0, 5.5]
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
        """Return the indices without the smallest of each segment in which this rank has no turn to
        propose one more."""
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
