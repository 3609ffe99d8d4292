"""Small kernels that go outside their tensors, for the tests of `bounds`."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy(source, target, first, count, BLOCK: tl.constexpr):
    """Copy `count` numbers, the first of them from position `first`."""
    lanes = tl.arange(0, BLOCK)
    found = tl.load(source + first + lanes, mask=lanes < count, other=0)
    tl.store(target + lanes, found, mask=lanes < count)


@triton.jit
def count(counter, at):
    tl.atomic_add(counter + at, 1)


@triton.jit
def note_address(table, source):
    tl.store(table, source.to(tl.int64))


@triton.jit
def read_from_address(table, target, at):
    source = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(target, tl.load(source + at))
