"""Small functions that the Triton kernels share."""
# mypy: ignore-errors

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 4):
    raise ImportError(f"these kernels need Triton 3.4 or newer, and this is {triton.__version__}")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NATIVE = tl.constexpr(not IS_INTERPRETED and torch.version.hip is None)


@triton.jit
def popcount(words):
    """Return the number of set bits of every int32."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    words = words + (words >> 8)
    return (words + (words >> 16)) & 0x3F


@triton.jit
def magnitude(values):
    """Return absolute float32 values as integers in the same order. NaN counts as infinite."""
    return tl.minimum(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000)


@triton.jit
def mix(words):
    """Compute `randomness.mix`."""
    words = words + -7046029254386353131
    words = (words ^ ((words >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    words = (words ^ ((words >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return words ^ ((words >> 31) & 0x1FFFFFFFF)


@triton.jit
def below(words, bounds):
    """Compute `randomness.below`."""
    return (words & 0x7FFFFFFFFFFFFFFF) % bounds


@triton.jit
def count_before(counts, first, last, BLOCK: tl.constexpr):
    """Return the sum of counts[first:last], without a separate scan."""
    lanes = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int64)
    for at in range(first, last, BLOCK):
        found += tl.load(counts + at + lanes, mask=at + lanes < last, other=0)
    return tl.sum(found)


@triton.jit
def one_of(rows, number, COUNT: tl.constexpr):
    """Return one of several addresses as an integer."""
    row = rows[0].to(tl.int64)
    for other in tl.static_range(1, COUNT):
        row = tl.where(number == other, rows[other].to(tl.int64), row)
    return row
