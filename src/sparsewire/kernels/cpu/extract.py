"""Selections that remove entries from the residual, and the tables that `walk` needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ...randomness import signed
from ...segments import Segments, TileTable
from ...workspace import Workspace
from .. import Selection, reference
from . import floors, numbers, walk
from .coding import rises
from .jit import CPU, Array, array, is_flat, parts_for, share_out
from .numbers import Sources
from .walk import Candidates, Picks, Scratch, Tiles

_KINDS = {
    torch.float32: numbers.PLAIN,
    torch.bfloat16: numbers.BFLOAT16,
    torch.float16: numbers.FLOAT16,
}
Limit = Literal["counts", "capacities"]  # the column that limits the entries of a segment
LARGE = 1 << 21  # coordinates; a larger residual does not stay in the cache until the next step
_NO_FLOATS = np.empty(0, np.float32)
_NO_HALVES = np.empty(0, np.uint16)
_NO_BITS = np.empty(0, np.uint32)
_NO_PLACES = np.empty(0, np.int64)
_NO_PICKS = Picks(_NO_PLACES, _NO_FLOATS)


def top_k(
    before: Tensor | None, addend: Tensor, after: Tensor, segments: Segments, work: Workspace
) -> Selection:
    if not _is_walkable(before, addend, after, segments):
        return reference.top_k(before, addend, after, segments, work)
    plan = plan_of(segments, "counts", work)
    sources = sources_of(before, addend)
    sample = plan.parts[0].scratch_for(floors.SAMPLE + 1).sample
    floors.start_guesses(
        tuple(sources), tuple(plan.segments), tuple(plan.guesses), sample, plan.floors
    )
    return _withdraw(sources, after, segments, plan, is_exact=True)


def over_threshold(
    before: Tensor | None,
    addend: Tensor,
    after: Tensor,
    segments: Segments,
    sample: int,
    key: int,
    work: Workspace,
) -> Selection:
    if not _is_walkable(before, addend, after, segments):
        return reference.over_threshold(before, addend, after, segments, sample, key, work)
    plan = plan_of(segments, "capacities", work)
    sources = sources_of(before, addend)
    strides = work.kept(
        segments, ("strides", sample), lambda: np.array(segments.strides(sample), np.int64)
    )
    plan.segments = plan.segments._replace(strides=strides, key=signed(key))
    selection = _withdraw(sources, after, segments, plan, is_exact=False)
    selection.indices[selection.count :] = segments.size
    selection.values[selection.count : selection.indices.numel()] = 0
    return selection


def chosen(
    before: Tensor | None,
    addend: Tensor,
    after: Tensor,
    segments: Segments,
    indices: Tensor,
    work: Workspace,
) -> Selection:
    if (
        not _is_walkable(before, addend, after, segments)
        or not is_flat(indices, torch.int64)
        or not rises(array(indices), segments.size)
    ):
        return reference.chosen(before, addend, after, segments, indices, work)
    plan = plan_of(segments, "counts", work)
    places, count = array(indices), indices.numel()
    # numpy requests huge pages; a dense gradient would need too many small ones
    goal = np.empty(count + segments.dense_size, np.float32)
    target, sources = array(after), sources_of(before, addend)
    cuts = [*np.searchsorted(places, plan.edges[:-1]).tolist(), count]

    def walk_part(number: int) -> None:
        part = plan.parts[number]
        here = slice(cuts[number], cuts[number + 1])
        goal[here] = 0  # slots with the padding index stay zero
        part.walk(sources, target, goal[count:], plan, _NO_BITS, Picks(places[here], goal[here]))

    share_out(len(plan.parts), walk_part)
    values = torch.from_numpy(goal)
    return Selection(indices, values, plan.param_squares(), plan.non_finite(), indices.numel())


def _withdraw(
    sources: Sources,
    after: Tensor,
    segments: Segments,
    plan: Plan,
    is_exact: bool,
) -> Selection:
    """Remove the entries whose magnitude reaches the floors of the plan."""
    count = int(plan.segments.limits.sum())
    indices = torch.empty(count, dtype=torch.int64)
    values = torch.empty(count + segments.dense_size)
    goal, target = array(values), array(after)

    def walk_part(number: int) -> None:
        part = plan.parts[number]
        part.candidates.found[:] = 0
        part.walk(sources, target, goal[count:], plan, plan.floors, _NO_PICKS)

    share_out(len(plan.parts), walk_part)
    total = walk.start_settle(
        tuple(plan.segments),
        is_exact,
        target,
        tuple(plan.join()),
        tuple(plan.guesses),
        array(indices),
        goal,
        tuple(plan.parts[0].scratch),
    )
    return Selection(indices, values, plan.param_squares(), plan.non_finite(), int(total))


def _is_walkable(before: Tensor | None, addend: Tensor, after: Tensor, segments: Segments) -> bool:
    return (
        is_flat(after, torch.float32)
        and after.numel() >= segments.size
        and is_addable(before, addend, segments)
    )


def is_addable(before: Tensor | None, addend: Tensor, segments: Segments) -> bool:
    """Return whether the compiled loops can add `before` and `addend`."""
    size = segments.size
    return (
        is_flat(addend, *_KINDS)
        and (before is None or (is_flat(before, torch.float32) and before.numel() >= size))
        and addend.numel() == size
        and size > 0
    )


def sources_of(before: Tensor | None, addend: Tensor) -> Sources:
    """Return the two terms of the sum in the form that `walk` expects."""
    kept = _NO_FLOATS if before is None else array(before)
    kind = _KINDS[addend.dtype]
    if kind == numbers.PLAIN:
        return Sources(kept, array(addend), _NO_HALVES, kind)
    return Sources(kept, _NO_FLOATS, array(addend.view(torch.int16)).view(np.uint16), kind)


@dataclass
class _Part:
    """The tiles of one thread, and buffers for their candidates."""

    tiles: Tiles
    candidates: Candidates
    scratch: Scratch = field(default_factory=Scratch.make)
    non_finite: int = -1

    def scratch_for(self, sample: int) -> Scratch:
        """Return the scratch memory, grown to hold a sample of `sample` values."""
        if len(self.scratch.sample) < sample:
            self.scratch = self.scratch._replace(sample=np.empty(sample, np.uint32))
        return self.scratch

    def walk(
        self,
        sources: Sources,
        after: Array,
        dense: Array,
        plan: Plan,
        reached: Array,
        picks: Picks,
    ) -> None:
        lengths, strides = plan.segments.lengths, plan.segments.strides
        longest = int((lengths // strides).max()) if len(strides) else 0
        self.non_finite = walk.start_walk(
            tuple(self.tiles),
            tuple(sources),
            after,
            dense,
            tuple(plan.segments),
            reached,
            tuple(self.candidates),
            tuple(picks),
            len(after) > LARGE,
            tuple(self.scratch_for(longest + 1)),
        )


class Plan:
    """Tables, buffers and guesses for one kind of selection on one partition of the gradient."""

    def __init__(self, segments: Segments, limit: Limit, parts: int) -> None:
        table, tiles = segments.table(CPU, Workspace()), TileTable.of(segments, CPU, walk.TILE)
        many = len(segments.sparse)
        self.params = len(segments.params)
        self.segments = floors.SegmentColumns(
            starts=array(table.starts),
            lengths=array(table.lengths),
            counts=array(table.counts),
            limits=array(getattr(table, limit)),
            names=array(table.keys),
            strides=_NO_PLACES,
            key=0,
        )
        self.floors = np.zeros(many, np.uint32)
        self.guesses = floors.Guesses(
            kth=np.full(many, numbers.INFINITE),
            trends=np.ones(many),
            falls=np.full(many, 0.025),
            tally=np.zeros(2, np.int64),
        )
        self._tiles = Tiles(
            array(tiles.starts),
            array(tiles.stops),
            array(tiles.params),
            array(tiles.segments),
            array(tiles.dense),
            np.zeros(len(tiles.starts)),
        )
        cuts = [segments.size * part // parts for part in range(parts + 1)]
        rows = np.searchsorted(self._tiles.starts, cuts)
        self.edges = np.append(self._tiles.starts, segments.size)[rows]
        self.parts = [self._part(low, high) for low, high in pairwise(rows.tolist())]
        total = sum(len(part.candidates.raw) for part in self.parts) if parts > 1 else 0
        self._joined = self._candidates(total)

    def _part(self, low: int, high: int) -> _Part:
        tiles = Tiles(*(column[low:high] for column in self._tiles))
        segments = np.unique(tiles.segments)
        limits = self.segments.limits[segments[segments >= 0]]
        capacity = int(limits.sum() + 2 * limits.max(initial=0)) + 2 * walk.TILE + 2
        return _Part(tiles, self._candidates(capacity))

    def _candidates(self, capacity: int) -> Candidates:
        return Candidates(
            raw=np.empty(capacity, np.uint32),
            places=np.empty(capacity, np.int64),
            found=np.zeros(len(self.floors), np.int64),
        )

    @property
    def tally(self) -> Array:
        """The numbers of floors that were low enough and too high."""
        return self.guesses.tally

    def join(self) -> Candidates:
        """Concatenate the candidates of all parts; a segment may span several parts."""
        if len(self.parts) == 1:
            return self.parts[0].candidates
        at, joined = 0, self._joined
        joined.found[:] = 0
        for part in self.parts:
            some = part.candidates
            count = int(some.found.sum())
            joined.raw[at : at + count] = some.raw[:count]
            joined.places[at : at + count] = some.places[:count]
            joined.found[:] += some.found
            at += count
        return joined

    def param_squares(self) -> Tensor:
        sums = np.bincount(self._tiles.params, self._tiles.squares, self.params)
        return torch.from_numpy(sums)

    def non_finite(self) -> Tensor:
        return torch.tensor(next((p.non_finite for p in self.parts if p.non_finite >= 0), -1))


def plan_of(segments: Segments, limit: Limit, work: Workspace) -> Plan:
    """Return the cached plan of a partition."""
    parts = parts_for(segments.size)
    return work.kept(segments, ("cpu", limit, parts), lambda: Plan(segments, limit, parts))
