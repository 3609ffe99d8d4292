"""Shards: which rank owns which coordinates.

Ownership is block-cyclic. Every parameter is divided into blocks of `BLOCK` coordinates. Each round
gives one block to every rank, and rounds begin with different ranks. Every rank therefore owns as
much of the regions where many entries are selected as of the others. The owner of a coordinate
depends only on the parameter's name and size, and not on DDP's buckets.

The coordinates of an owner form a flat gradient in the same order, with `Segments` of its own, so
that selectors, codecs and kernels work on it as on any other gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TypeVar

import torch
from torch import Tensor

from .randomness import name_key
from .segments import ParamSlice, Segment, Segments
from .workspace import Workspace

SLACK = 1.25  # slots for the entries of one rank at one owner, relative to an equal share
BLOCK = 16  # coordinates: a cache line of float32

Number = TypeVar("Number", int, Tensor)


def rotation(turn: Number, key: Number, world_size: int) -> Number:
    """Return the owner of the first block of a round."""
    return (((turn * 40503 + key) & 0xFFFF) * world_size) >> 16


@cache
def block_key(name: str) -> int:
    """Return the key of a parameter's rounds."""
    return name_key(name) & 0xFFFF


def owned(name: str, length: int, owner: int, world_size: int) -> int:
    """Return how many of the first `length` coordinates of a parameter belong to an owner."""
    turn, left = divmod(length, BLOCK * world_size)
    block = (owner - rotation(turn, block_key(name), world_size)) % world_size
    return turn * BLOCK + min(max(left - block * BLOCK, 0), BLOCK)


def owners(name: str, length: int, world_size: int) -> Tensor:
    """Return the owner of each coordinate of a parameter."""
    block = torch.arange(length) // BLOCK
    return (
        block + rotation(block // world_size, torch.tensor(block_key(name)), world_size)
    ) % world_size


@dataclass(frozen=True)
class Shards:
    """A gradient whose coordinates are divided among owners.

    Arguments:
        segments: The segments of the gradient.
        world_size: The number of owners.
        ratio: The share of its coordinates that an owner sends back. If None, as many as a rank
            sends; with 1.0, all that arrived.
        clustered: True if the entries of a rank are neighbours, which may all fall into a few
            blocks.
    """

    segments: Segments
    world_size: int
    ratio: float | None = None
    clustered: bool = False

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """The start of each owner's slots, and the end of the last one's."""
        return tuple(itertools.accumulate((part.capacity for part in self._parts), initial=0))

    @cached_property
    def selected(self) -> Segments:
        """The gradient without what is sent densely."""
        return replace(self.segments, dense=())

    def part(self, owner: int) -> Segments:
        """Return an owner's coordinates, with slots for the entries that one rank sends it."""
        return self._parts[owner]

    def result(self, owner: int) -> Segments:
        """Return an owner's coordinates, with slots for the entries that it sends back."""
        return self._results[owner]

    @cached_property
    def _parts(self) -> tuple[Segments, ...]:
        return tuple(self._cut(owner, is_result=False) for owner in range(self.world_size))

    @cached_property
    def _results(self) -> tuple[Segments, ...]:
        return tuple(self._cut(owner, is_result=True) for owner in range(self.world_size))

    def _cut(self, owner: int, is_result: bool) -> Segments:
        params = self._spans[owner]
        sparse: list[Segment] = []
        dense: list[Segment] = []
        for segment, is_whole in self._segments:
            start, stop = self.extent(segment, owner)
            length = stop - start
            if not length:
                continue
            count = capacity = self.part_capacity(segment, length)
            if is_result:
                count, capacity = self._result_capacity(segment, length, capacity)
            if is_whole or (is_result and count >= length):
                dense.append(Segment(segment.name, start, length, length, length))
            else:
                sparse.append(Segment(segment.name, start, length, count, capacity))
        return Segments(params, tuple(sparse), tuple(dense))

    @cached_property
    def _spans(self) -> tuple[tuple[ParamSlice, ...], ...]:
        """For each owner, the coordinates that it owns of each parameter."""
        rows: list[tuple[ParamSlice, ...]] = []
        for owner in range(self.world_size):
            params: list[ParamSlice] = []
            for param in self.segments.params:
                start = params[-1].stop if params else 0
                length = owned(param.name, param.length, owner, self.world_size)
                params.append(ParamSlice(param.name, (length,), start))
            rows.append(tuple(params))
        return tuple(rows)

    @cached_property
    def _segments(self) -> tuple[tuple[Segment, bool], ...]:
        """All segments in order, and whether each of them is sent densely."""
        both = [(segment, False) for segment in self.segments.sparse]
        both += [(segment, True) for segment in self.segments.dense]
        return tuple(sorted(both, key=lambda entry: entry[0].start))

    def extent(self, segment: Segment, owner: int) -> tuple[int, int]:
        """Return the start and stop of a segment in an owner's shard."""
        return self._before(segment.start, owner), self._before(segment.stop, owner)

    def _before(self, edge: int, owner: int) -> int:
        """Return how many of an owner's coordinates come before a coordinate of the gradient."""
        local = self._spans[owner]
        if edge == self.segments.size:
            return local[-1].stop
        number = self.segments.param_at(edge)
        param = self.segments.params[number]
        return local[number].start + owned(param.name, edge - param.start, owner, self.world_size)

    def part_capacity(self, segment: Segment, length: int) -> int:
        """Return the slots for a segment's entries from one rank, at an owner of `length` of it."""
        share = segment.count * length / segment.length
        slots = math.ceil(max(SLACK * share, share + 3 * math.sqrt(share)))
        if self.clustered:
            slots = BLOCK * (2 + math.ceil(segment.count / (BLOCK * self.world_size)))
        return min(slots, length, segment.capacity)

    def _result_capacity(self, segment: Segment, length: int, part: int) -> tuple[int, int]:
        """Return how many entries of a segment an owner of `length` sends back, and their slots."""
        if self.ratio == 1.0:
            count = min(length, self.world_size * part)
            return count, count
        share = segment.count / segment.length if self.ratio is None else self.ratio
        # a hair above a whole number is that number
        count = min(length, max(1, math.ceil(share * length * (1 - 1e-12))))
        return count, min(length, math.ceil(count * segment.capacity / segment.count))

    def table(self, device: torch.device, work: Workspace) -> ShardTable:
        """Return the shards as tensors, kept in a rank's workspace."""
        return work.kept(self, ("table", device), lambda: ShardTable.of(self, device))


@dataclass(frozen=True)
class ShardTable:
    """The owners of coordinates and the slots for their entries, as int64 tensors."""

    starts: Tensor  # of each parameter in the gradient
    keys: Tensor  # of each parameter's rounds
    local: Tensor  # the start of each parameter in every owner's shard: a row for each owner
    segments: Tensor  # the start of each segment in the gradient
    capacities: Tensor  # slots for each segment in a part: a row for each owner
    slots: Tensor  # the start of each owner's slots, and the end of the last one's
    fillers: Tensor  # for each slot, its owner's padding index

    @staticmethod
    def of(shards: Shards, device: torch.device) -> ShardTable:
        def column(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int64)

        segments, owners = shards.segments, range(shards.world_size)
        parts = [shards.part(owner) for owner in owners]
        capacities = torch.zeros(shards.world_size, len(segments.sparse), dtype=torch.int64)
        for owner in owners:
            for number, segment in enumerate(segments.sparse):
                start, stop = shards.extent(segment, owner)
                capacities[owner, number] = shards.part_capacity(segment, stop - start)
        totals = capacities.sum(dim=1)
        columns = (
            column(param.start for param in segments.params),
            column(block_key(param.name) for param in segments.params),
            torch.stack([column(param.start for param in part.params) for part in parts]),
            column(segment.start for segment in segments.sparse),
            capacities,
            column(shards.slots),
            torch.repeat_interleave(column(part.size for part in parts), totals),
        )
        return ShardTable(*(tensor.to(device) for tensor in columns))
