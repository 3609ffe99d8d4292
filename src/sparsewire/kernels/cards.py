"""Dealing a parameter's coordinates out to owners, like cards.

`CARD` coordinates go at a time, one card to every owner in a turn, and turns begin with different
owners: whatever period a gradient has, everybody gets a fair part of it.
"""

from __future__ import annotations

from functools import cache
from typing import TypeVar

from torch import Tensor

from ..randomness import name_key

CARD = 16  # coordinates: a cache line of float32

Number = TypeVar("Number", int, Tensor)


def rotation(turn: Number, key: Number, world: int) -> Number:
    """Which owner gets the first card of a turn."""
    return (((turn * 40503 + key) & 0xFFFF) * world) >> 16


@cache
def card_key(name: str) -> int:
    """What sets a parameter's turns apart from another's."""
    return name_key(name) & 0xFFFF


def owned(name: str, length: int, owner: int, world: int) -> int:
    """How many of the first `length` coordinates of a parameter an owner has."""
    turn, left = divmod(length, CARD * world)
    card = (owner - rotation(turn, card_key(name), world)) % world
    return turn * CARD + min(max(left - card * CARD, 0), CARD)
