"""Distribution of entries among the owners of their coordinates, and back, in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...shards import BLOCK, Shards, ShardTable
from ...workspace import Workspace
from .. import reference
from .jit import Array, array, is_flat, jit

_BITS = BLOCK.bit_length() - 1  # bits of a position within a block


class _Columns(NamedTuple):
    """A `ShardTable` as arrays."""

    starts: Array
    keys: Array
    local: Array
    segments: Array
    capacities: Array
    slots: Array

    @staticmethod
    def of(table: ShardTable) -> _Columns:
        return _Columns(*(array(getattr(table, name)) for name in _Columns._fields))


def deal(indices: Tensor, shards: Shards, work: Workspace) -> tuple[Tensor, Tensor]:
    if not is_flat(indices, torch.int64):
        return reference.deal(indices, shards, work)
    table = shards.table(indices.device, work)
    places = table.fillers.clone()
    sources = torch.full_like(places, indices.numel())
    size = shards.segments.size
    _deal(array(indices), array(places), array(sources), _Columns.of(table), size)
    return places, sources


def collect(places: Tensor, owner: int, shards: Shards, work: Workspace) -> Tensor:
    if not is_flat(places, torch.int64):
        return reference.collect(places, owner, shards, work)
    table = shards.table(places.device, work)
    indices = torch.empty_like(places)
    count, size = shards.part(owner).size, shards.segments.size
    _collect(array(places), array(indices), owner, _Columns.of(table), count, size)
    return indices


@jit
def _rotation(turn: int, key: int, world_size: int) -> int:
    """Compiled version of `shards.rotation`."""
    return (((turn * 40503 + key) & 0xFFFF) * world_size) >> 16


@jit
def _deal(indices: Array, places: Array, sources: Array, table: _Columns, size: int) -> None:
    """Distribute entries. Indices ascend, so each parameter and segment is visited once."""
    starts, keys, local = table.starts, table.keys, table.local
    segments, capacities, slots = table.segments, table.capacities, table.slots
    world_size = len(capacities)
    whole_turn = BLOCK * world_size
    inverse = 1 / whole_turn  # integer division takes ten times as long
    filled = slots[:world_size].copy()
    ends = filled.copy()  # where each owner's slots for the current segment end
    param, segment = -1, -1
    for n in range(len(indices)):
        index = indices[n]
        if index >= size:
            break
        while param + 1 < len(starts) and starts[param + 1] <= index:
            param += 1
        if segment + 1 < len(segments) and segments[segment + 1] <= index:
            while segment + 1 < len(segments) and segments[segment + 1] <= index:
                segment += 1
            for owner in range(world_size):
                ends[owner] = filled[owner] + capacities[owner, segment]
        turn = int((index - starts[param]) * inverse)
        place = index - starts[param] - turn * whole_turn
        if place < 0:
            turn, place = turn - 1, place + whole_turn
        elif place >= whole_turn:
            turn, place = turn + 1, place - whole_turn
        owner = (place >> _BITS) + _rotation(turn, keys[param], world_size)
        if owner >= world_size:
            owner -= world_size
        slot = filled[owner]
        if slot < ends[owner]:
            places[slot] = local[owner, param] + (turn << _BITS) + (place & (BLOCK - 1))
            sources[slot] = n
            filled[owner] = slot + 1


@jit
def _collect(
    places: Array, indices: Array, owner: int, table: _Columns, count: int, size: int
) -> None:
    starts, keys, local = table.starts, table.keys, table.local[owner]
    world_size = len(table.local)
    param = 0
    for n in range(len(places)):
        place = places[n]
        if not 0 <= place < count:
            indices[n] = size
            continue
        if place < local[param]:  # happens only with corrupt messages
            param = 0
        while param + 1 < len(local) and local[param + 1] <= place:
            param += 1
        inside = place - local[param]
        turn = inside >> _BITS
        block = owner - _rotation(turn, keys[param], world_size)
        if block < 0:
            block += world_size
        block += turn * world_size
        indices[n] = starts[param] + (block << _BITS) + (inside & (BLOCK - 1))
