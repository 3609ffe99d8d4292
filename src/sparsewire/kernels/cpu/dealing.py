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

_BITS = CARD.bit_length() - 1  # of a place on a card


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
    """Indices ascend, so span and piece only ever move on."""
    world = len(rooms)
    whole_turn = CARD * world
    inverse = 1 / whole_turn  # division of whole numbers takes ten times as long
    filled = slots[:world].copy()
    ends = filled.copy()  # where each owner's slots for the current piece end
    span, piece = -1, -1
    for n in range(len(indices)):
        index = indices[n]
        if index >= size:
            break
        while span + 1 < len(starts) and starts[span + 1] <= index:
            span += 1
        if piece + 1 < len(pieces) and pieces[piece + 1] <= index:
            while piece + 1 < len(pieces) and pieces[piece + 1] <= index:
                piece += 1
            for owner in range(world):
                ends[owner] = filled[owner] + rooms[owner, piece]
        turn = int((index - starts[span]) * inverse)
        place = index - starts[span] - turn * whole_turn
        if place < 0:
            turn, place = turn - 1, place + whole_turn
        elif place >= whole_turn:
            turn, place = turn + 1, place - whole_turn
        owner = (place >> _BITS) + _rotation(turn, keys[span], world)
        if owner >= world:
            owner -= world
        slot = filled[owner]
        if slot < ends[owner]:
            places[slot] = local[owner, span] + (turn << _BITS) + (place & (CARD - 1))
            sources[slot] = n
            filled[owner] = slot + 1


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
        turn = inside >> _BITS
        card = owner - _rotation(turn, keys[span], world)
        if card < 0:
            card += world
        card += turn * world
        indices[n] = starts[span] + (card << _BITS) + (inside & (CARD - 1))
