"""Floating-point bit operations: comparing magnitudes and widening 16-bit numbers.

Magnitudes of float32 are compared as integers with the sign bit cleared, which preserves their
order. NaN counts as infinite.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .jit import Array, jit

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)
NONE = np.uint32(0)  # a floor that every magnitude reaches
NEVER = np.uint32(0xFFFFFFFF)  # a floor that no magnitude reaches
PLAIN, BFLOAT16, FLOAT16 = range(3)  # kinds of addends


class Sources(NamedTuple):
    """The terms of the accumulation: before + addend.

    Without a residual, `before` is empty. A 16-bit addend is stored in `halves`, and `addend` is
    empty.
    """

    before: Array
    addend: Array
    halves: Array
    kind: int


@jit
def magnitude(bits: Any) -> Any:
    return min(np.uint32(bits & MAGNITUDE), INFINITE)


@jit
def widened(half: Any, kind: int) -> Any:
    """Convert the bits of a bfloat16 or float16 to those of the equal float32."""
    half = np.uint32(half)
    if kind == BFLOAT16:
        return np.uint32(half << np.uint32(16))
    sign = np.uint32((half & np.uint32(0x8000)) << np.uint32(16))
    rest = np.uint32(half & np.uint32(0x7FFF))
    if rest < np.uint32(0x400):  # subnormal: a multiple of 2^-24
        small = np.float32(np.float32(rest) * np.float32(2.0**-24))
        return np.uint32(sign | np.float32(small).view(np.uint32))
    bias = np.uint32(224 << 23) if rest >= np.uint32(0x7C00) else np.uint32(112 << 23)
    return np.uint32(sign | ((rest << np.uint32(13)) + bias))


@jit
def widen(halves: Array, kind: int, out: Array) -> None:
    if kind == BFLOAT16:
        for n in range(len(halves)):
            out[n] = np.uint32(np.uint32(halves[n]) << np.uint32(16))
    else:
        for n in range(len(halves)):
            out[n] = widened(halves[n], kind)


@jit
def reaching(raw: Array, floor: Any) -> Any:
    """Count the magnitudes that reach the floor."""
    count = np.int32(0)
    for n in range(len(raw)):
        count += np.int32(magnitude(raw[n]) >= floor)
    return np.int64(count)


@jit
def kth_magnitude(raw: Array, count: Any) -> Any:
    """Return the `count`-th largest magnitude, found bit by bit; 0 if there are fewer."""
    floor = np.uint32(0)
    for bit in range(30, -1, -1):
        higher = np.uint32(floor | np.uint32(1 << bit))
        if higher <= INFINITE and reaching(raw, higher) >= count:
            floor = higher
    return floor


@jit
def smallest(raw: Array) -> Any:
    least = INFINITE
    for n in range(len(raw)):
        least = min(least, magnitude(raw[n]))
    return least
