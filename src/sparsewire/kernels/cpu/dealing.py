"""Dealing entries out to the owners of their coordinates, and back: one look at each entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import reference
from ..cards import CARD
from .jit import Array, array, is_flat, jit

if TYPE_CHECKING:
    from ...shards import Shards


def deal(indices: Tensor, shards: Shards) -> tuple[Tensor, Tensor]:
    if not is_flat(indices, torch.int64):
        return reference.deal(indices, shards)
    table = shards.table(indices.device)
    places = table.fillers.clone()
    sources = torch.full_like(places, indices.numel())
    _deal(
        array(indices),
        array(places),
        array(sources),
        array(table.starts),
        array(table.keys),
        array(table.local),
        array(table.pieces),
        array(table.rooms),
        array(table.slots),
        shards.segments.size,
    )
    return places, sources


def collect(places: Tensor, owner: int, shards: Shards) -> Tensor:
    if not is_flat(places, torch.int64):
        return reference.collect(places, owner, shards)
    table = shards.table(places.device)
    indices = torch.empty_like(places)
    _collect(
        array(places),
        array(indices),
        owner,
        shards.world,
        array(table.starts),
        array(table.keys),
        array(table.local[owner]),
        shards.part(owner).size,
        shards.segments.size,
    )
    return indices


@jit
def _rotation(turn: int, key: int, world: int) -> int:
    """The twin of `cards.rotation`."""
    return (((turn * 40503 + key) & 0xFFFF) * world) >> 16


@jit
def _deal(
    indices: Array,
    places: Array,
    sources: Array,
    starts: Array,
    keys: Array,
    local: Array,
    pieces: Array,
    rooms: Array,
    slots: Array,
    size: int,
) -> None:
    """Indices ascend, so span, piece and turn only ever move on."""
    world = len(rooms)
    filled = slots[:world].copy()
    ends = filled.copy()  # where each owner's slots for the current piece end
    span, piece, turn, start = -1, -1, 0, 0
    for n in range(len(indices)):
        index = indices[n]
        if index >= size:
            break
        while span + 1 < len(starts) and starts[span + 1] <= index:
            span += 1
            turn, start = 0, starts[span]  # of the turn
        if piece + 1 < len(pieces) and pieces[piece + 1] <= index:
            while piece + 1 < len(pieces) and pieces[piece + 1] <= index:
                piece += 1
            for owner in range(world):
                ends[owner] = filled[owner] + rooms[owner, piece]
        while index - start >= CARD * world:
            start += CARD * world
            turn += 1
        owner = (index - start) // CARD + _rotation(turn, keys[span], world)
        if owner >= world:
            owner -= world
        if filled[owner] < ends[owner]:
            places[filled[owner]] = local[owner, span] + turn * CARD + (index - start) % CARD
            sources[filled[owner]] = n
            filled[owner] += 1


@jit
def _collect(
    places: Array,
    indices: Array,
    owner: int,
    world: int,
    starts: Array,
    keys: Array,
    local: Array,
    count: int,
    size: int,
) -> None:
    span = 0
    for n in range(len(places)):
        place = places[n]
        if not 0 <= place < count:
            indices[n] = size
            continue
        if place < local[span]:  # only of damaged messages
            span = 0
        while span + 1 < len(local) and local[span + 1] <= place:
            span += 1
        inside = place - local[span]
        turn = inside // CARD
        card = owner - _rotation(turn, keys[span], world)
        if card < 0:
            card += world
        indices[n] = starts[span] + (turn * world + card) * CARD + inside % CARD
