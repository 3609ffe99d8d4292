"""Withdrawals: what `walk` needs, made once for every cut gradient and kept in a workspace."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ...randomness import name_key, signed
from ...segments import Segments, TileTable
from ...workspace import Workspace
from .. import Selection, reference
from . import floors, numbers, walk
from .coding import rises
from .jit import CPU, Array, array, is_flat, parts_for, share_out

_KINDS = {
    torch.float32: numbers.PLAIN,
    torch.bfloat16: numbers.BFLOAT16,
    torch.float16: numbers.FLOAT16,
}
Sources = tuple[Array, Array, Array, int]  # before, addend, addend as halves, its kind

LARGE = 1 << 21  # coordinates that do not stay in the cache until the next step
_NO_FLOATS = np.empty(0, np.float32)
_NO_HALVES = np.empty(0, np.uint16)
_NO_BITS = np.empty(0, np.uint32)
_NO_PLACES = np.empty(0, np.int64)


def top_k(
    before: Tensor | None, addend: Tensor, after: Tensor, segments: Segments, work: Workspace
) -> Selection:
    if not _is_walkable(before, addend, after, segments):
        return reference.top_k(before, addend, after, segments, work)
    plan = plan_of(segments, floors.COUNT, work)
    sources = sources_of(before, addend)
    buffer = plan.parts[0].sample(floors.SAMPLE + 1)
    floors.guess_floors(
        *sources, plan.segments, plan.kth, plan.trends, plan.falls, buffer, plan.floors
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
    plan = plan_of(segments, floors.ROOM, work)
    sources = sources_of(before, addend)
    plan.strides = work.kept(
        segments, ("strides", sample), lambda: np.array(segments.strides(sample), np.int64)
    )
    plan.key = signed(key)
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
    plan = plan_of(segments, floors.COUNT, work)
    places, count = array(indices), indices.numel()
    # not torch's: numpy asks for huge pages, and a dense gradient has too many of the small ones
    goal = np.empty(count + segments.dense_size, np.float32)
    target, sources = array(after), sources_of(before, addend)
    cuts = [*np.searchsorted(places, plan.edges[:-1]).tolist(), count]

    def walk_part(number: int) -> None:
        part = plan.parts[number]
        here = slice(cuts[number], cuts[number + 1])
        goal[here] = 0  # what is nowhere stays so
        part.walk(sources, target, goal[count:], plan, _NO_BITS, places[here], goal[here])

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
    """Withdraw what reaches the floors of the plan, and say how many were found."""
    count = int(plan.limits.sum())
    indices = torch.empty(count, dtype=torch.int64)
    values = torch.empty(count + segments.dense_size)
    goal, target = array(values), array(after)

    def walk_part(number: int) -> None:
        part = plan.parts[number]
        part.found[:] = 0
        part.hits[:] = 0
        part.walk(sources, target, goal[count:], plan, plan.floors, _NO_PLACES, _NO_FLOATS)

    share_out(len(plan.parts), walk_part)
    raw, places, found = plan.join()
    part = plan.parts[0]
    total = walk.settle(
        plan.segments,
        plan.limits,
        is_exact,
        target,
        raw,
        places,
        found,
        plan.kth,
        plan.trends,
        plan.falls,
        plan.tally,
        array(indices),
        goal,
        part.space,
        part.marks,
    )
    return Selection(indices, values, plan.param_squares(), plan.non_finite(), int(total))


def _is_walkable(before: Tensor | None, addend: Tensor, after: Tensor, segments: Segments) -> bool:
    return (
        is_flat(after, torch.float32)
        and after.numel() >= segments.size
        and is_addable(before, addend, segments)
    )


def is_addable(before: Tensor | None, addend: Tensor, segments: Segments) -> bool:
    """Whether loops can add the two up."""
    size = segments.size
    return (
        is_flat(addend, *_KINDS)
        and (before is None or (is_flat(before, torch.float32) and before.numel() >= size))
        and addend.numel() == size
        and size > 0
    )


def sources_of(before: Tensor | None, addend: Tensor) -> Sources:
    """What is added up, as `walk` takes it."""
    kept = _NO_FLOATS if before is None else array(before)
    kind = _KINDS[addend.dtype]
    if kind == numbers.PLAIN:
        return kept, array(addend), _NO_HALVES, kind
    return kept, _NO_FLOATS, array(addend.view(torch.int16)).view(np.uint16), kind


@dataclass
class _Part:
    """The tiles of one thread, and room for their candidates."""

    tiles: Array
    squares: Array
    raw: Array
    places: Array
    found: Array  # candidates left, for every segment
    hits: Array  # candidates seen
    space: Array
    marks: Array
    non_finite: int = -1
    buffer: Array = field(default_factory=lambda: _NO_BITS)

    def sample(self, length: int) -> Array:
        """Room for a sample of a segment."""
        if len(self.buffer) < length:
            self.buffer = np.empty(length, np.uint32)
        return self.buffer

    def walk(
        self,
        sources: Sources,
        after: Array,
        dense: Array,
        plan: Plan,
        reached: Array,
        chosen: Array,
        values: Array,
    ) -> None:
        longest = (
            (plan.segments[:, floors.LENGTH] // plan.strides).max() if len(plan.strides) else 0
        )
        self.non_finite = walk.walk(
            self.tiles,
            *sources,
            after,
            dense,
            plan.segments,
            plan.names,
            plan.strides,
            plan.key,
            reached,
            plan.limits,
            self.raw,
            self.places,
            self.found,
            self.hits if plan.counts_hits else _NO_PLACES,
            chosen,
            values,
            self.squares,
            len(after) > LARGE,
            self.sample(int(longest) + 1),
            self.space,
            self.marks,
        )


class Plan:
    """Tables, buffers and guesses for one way to withdraw from one cut gradient."""

    def __init__(self, segments: Segments, limit: int, parts: int) -> None:
        table = TileTable.of(segments, CPU, walk.TILE)
        columns = (table.starts, table.stops, table.params, table.segments, table.dense)
        self.tiles = np.stack([array(column) for column in columns], axis=1)
        self.squares = np.zeros(len(self.tiles))
        self.params = len(segments.params)
        rows = [(p.start, p.length, p.count, p.capacity) for p in segments.sparse]
        self.segments = np.array(rows, np.int64).reshape(-1, 4)
        self.limits = self.segments[:, limit].copy()
        self.counts_hits = limit == floors.ROOM
        self.floors = np.zeros(len(rows), np.uint32)
        self.kth = np.full(len(rows), numbers.INFINITE)
        self.trends = np.ones(len(rows))
        self.falls = np.full(len(rows), 0.025)
        self.tally = np.zeros(2, np.int64)  # floors that were low enough, and that were not
        self.names = np.array([name_key(p.name) for p in segments.sparse], np.int64)
        self.strides = _NO_PLACES  # of thresholds' samples
        self.key = 0

        starts = self.tiles[:, walk.START]
        cuts = np.searchsorted(starts, [segments.size * n // parts for n in range(parts + 1)])
        self.edges = np.append(starts, segments.size)[cuts]
        self.parts = [self._part(low, high) for low, high in pairwise(cuts.tolist())]
        total = sum(len(part.raw) for part in self.parts) if parts > 1 else 0
        self._raw, self._places = np.empty(total, np.uint32), np.empty(total, np.int64)

    def _part(self, low: int, high: int) -> _Part:
        tiles = self.tiles[low:high]
        segments = np.unique(tiles[:, walk.PIECE])
        limits = self.limits[segments[segments >= 0]]
        space, marks = walk.workspace()
        capacity = int(limits.sum() + 2 * limits.max(initial=0)) + 2 * walk.TILE + 2
        return _Part(
            tiles=tiles,
            squares=self.squares[low:high],
            raw=np.empty(capacity, np.uint32),
            places=np.empty(capacity, np.int64),
            found=np.zeros(len(self.limits), np.int64),
            hits=np.zeros(len(self.limits), np.int64),
            space=space,
            marks=marks,
        )

    def join(self) -> tuple[Array, Array, Array]:
        """The candidates of all parts in one place; a segment may lie in several parts."""
        if len(self.parts) == 1:
            part = self.parts[0]
            return part.raw, part.places, part.found
        at = 0
        for part in self.parts:
            count = int(part.found.sum())
            self._raw[at : at + count] = part.raw[:count]
            self._places[at : at + count] = part.places[:count]
            at += count
        return self._raw, self._places, np.sum([part.found for part in self.parts], axis=0)

    def param_squares(self) -> Tensor:
        params = self.tiles[:, walk.SPAN]
        return torch.from_numpy(np.bincount(params, self.squares, self.params))

    def non_finite(self) -> Tensor:
        return torch.tensor(next((p.non_finite for p in self.parts if p.non_finite >= 0), -1))


def plan_of(segments: Segments, limit: int, work: Workspace) -> Plan:
    """The plan of a cut gradient, made once."""
    parts = parts_for(segments.size)
    return work.kept(segments, ("cpu", limit, parts), lambda: Plan(segments, limit, parts))
