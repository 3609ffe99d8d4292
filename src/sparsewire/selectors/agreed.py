"""Selectors by which all ranks choose the same coordinates, though these depend on the gradient.

Ranks talk before they choose: little, and then no index travels with the values, which can be added
up on the way.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..errors import SchemeError
from ..kernels import Taken
from ..kernels.blocks import BlockTable
from ..segments import Segments
from .base import Coordination, Draw, Sized, Table


@dataclass(frozen=True, repr=False)
class TopBlock(Sized):
    """The blocks of every piece that hold the most, summed over all ranks.

    Every piece is cut into blocks of `block` coordinates from its start on, and the last one may be
    shorter. All ranks add up the squared norms of their blocks, gradient and memory together, and
    the largest sums are chosen, equal ones from the left: `ratio` of the blocks (rounded up, at
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

    def room(self, length: int) -> int:
        return self.entries(length)

    def _chosen(self, length: int) -> int:
        """How many blocks of a piece are sent."""
        blocks = -(-length // self.block)
        if self.count is not None:
            return min(blocks, -(-self.count // self.block))
        assert self.ratio is not None
        # a hair above a whole number is that number
        return min(blocks, max(1, math.ceil(self.ratio * blocks * (1 - 1e-12))))

    def summed(self, segments: Segments) -> int:
        return sum(-(-piece.length // self.block) for piece in segments.pieces)

    def withdraw(
        self,
        before: Tensor | None,
        addend: Tensor,
        after: Tensor,
        segments: Segments,
        draw: Draw,
    ) -> Taken:
        if not segments.pieces:
            nothing = addend.new_empty(0, dtype=torch.int64)
            return kernels.on(after.device).chosen(before, addend, after, segments, nothing)
        norms = kernels.on(after.device).block_norms(before, addend, segments, self.block)
        return self._take(norms, before, addend, after, segments)

    def choose(
        self,
        before: Tensor | None,
        addend: Tensor,
        after: Tensor,
        segments: Segments,
        draw: Draw,
        table: Table,
    ) -> Generator[Any, Any, Taken]:
        if not segments.pieces:
            return self.withdraw(before, addend, after, segments, draw)
        norms = kernels.on(after.device).block_norms(before, addend, segments, self.block)
        norms = yield from table.add_up(norms)
        return self._take(norms, before, addend, after, segments)

    def _take(
        self,
        norms: Tensor,
        before: Tensor | None,
        addend: Tensor,
        after: Tensor,
        segments: Segments,
    ) -> Taken:
        kernel = kernels.on(after.device)
        indices = kernel.top_blocks(norms, segments, self.block)
        taken = kernel.chosen(before, addend, after, segments, indices)
        if not BlockTable.of(segments, self.block, after.device).is_ragged:
            return taken
        return replace(taken, count=(indices < segments.size).sum())

    def contraction(self, length: int) -> float:
        return self._chosen(length) / -(-length // self.block)


@dataclass(frozen=True, repr=False)
class _Named(Sized):
    """What those share whose ranks name their largest magnitudes: a rank alone does as `TopK`."""

    coordination = Coordination.NEGOTIATED

    def room(self, length: int) -> int:
        return self.entries(length)

    def withdraw(
        self,
        before: Tensor | None,
        addend: Tensor,
        after: Tensor,
        segments: Segments,
        draw: Draw,
    ) -> Taken:
        return kernels.on(after.device).top_k(before, addend, after, segments)

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

    def choose(
        self,
        before: Tensor | None,
        addend: Tensor,
        after: Tensor,
        segments: Segments,
        draw: Draw,
        table: Table,
    ) -> Generator[Any, Any, Taken]:
        if table.turn == 0 or not segments.pieces:
            taken = self.withdraw(before, addend, after, segments, draw)
            if segments.pieces:
                yield from table.name(taken.indices)
            return taken
        indices = yield from table.hear()
        return kernels.on(after.device).chosen(before, addend, after, segments, indices)


@dataclass(frozen=True, repr=False)
class UnionTopK(_Named):
    """The largest magnitudes of every rank, a share each: all ranks send what they have there.

    Where k coordinates of a piece are sent, each of W ranks names its k/W largest magnitudes; what
    that leaves over, k mod W, is named by as many of the ranks, who take turns. All ranks send
    their values at all of these. No rank waits for its turn to lead, as with `LeaderTopK`, and only
    the indices travel besides the values. What several ranks name is sent once, so there may be
    fewer than k.

    For one rank ‖x − C(x)‖² ≤ (1 − k/n)‖x‖², and for each of W, where k ≥ W, at least
    ‖x − C(x)‖² ≤ (1 − ⌊k/W⌋/n)‖x‖².

    >>> UnionTopK(0.01).entries(10_000), UnionTopK(0.01).names(100, world=8)
    (100, 13)
    """

    proposers = "all"

    def names(self, count: int, world: int) -> int:
        return -(-count // world)

    def choose(
        self,
        before: Tensor | None,
        addend: Tensor,
        after: Tensor,
        segments: Segments,
        draw: Draw,
        table: Table,
    ) -> Generator[Any, Any, Taken]:
        if not segments.pieces:
            return self.withdraw(before, addend, after, segments, draw)
        kernel = kernels.on(after.device)
        own = kernel.top_k(before, addend, after, table.notice)
        named = yield from table.pool(self._in_turn(own, segments, table))
        taken = kernel.chosen(before, addend, after, segments, named)
        return replace(taken, count=(named < segments.size).sum())

    @staticmethod
    def _in_turn(own: Taken, segments: Segments, table: Table) -> Tensor:
        """The indices, without the smallest of every piece that enough others name one more of."""
        indices, device = own.indices, own.indices.device
        said, sent = (each.table(device) for each in (table.notice, segments))
        is_enough = said.counts * table.world - sent.counts >= table.world - table.turn
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
