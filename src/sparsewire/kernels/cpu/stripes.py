"""LLVM intrinsics that numba lacks: vectors of 64 numbers, bit counts, and raw memory access.

A stripe of 64 numbers compiles to the processor's widest vector instructions, independently of how
the compiler treats the surrounding loop. Addresses are int64; the caller must ensure that the
memory is valid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from .jit import Array, jit
from .numbers import INFINITE, MAGNITUDE

STRIPE = 64  # numbers; one per bit of a word

_BIT, _INT, _WORD, _FLOAT = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _INTS, _BITS = (ir.VectorType(kind, STRIPE) for kind in (_FLOAT, _INT, _BIT))


def _intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    return cast(Callable[..., Any], intrinsic(function))


@_intrinsic
def lowest_bit(_typing: Any, word: Any) -> Any:
    """Return the position of the lowest bit set in a uint64; 64 if there is none."""

    def build(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.cttz(values[0], _BIT(0))

    return types.int64(types.uint64), build


@_intrinsic
def bits_set(_typing: Any, word: Any) -> Any:
    """Return the number of set bits of a uint64."""

    def build(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.ctpop(values[0])

    return types.int64(types.uint64), build


def _spread(builder: Any, value: Any) -> Any:
    start = builder.insert_element(_INTS(ir.Undefined), value, _INT(0))
    return builder.shuffle_vector(start, _INTS(ir.Undefined), _INTS([0] * STRIPE))


def _total(builder: Any, vector: Any) -> Any:
    """Sum a vector by adding its upper half to its lower half repeatedly."""
    width = STRIPE
    while width > 1:
        width //= 2
        none, places = vector.type(ir.Undefined), ir.VectorType(_INT, width)
        lower, upper = (
            builder.shuffle_vector(vector, none, places(list(range(at, at + width))))
            for at in (0, width)
        )
        vector = builder.fadd(lower, upper)
    return builder.extract_element(vector, _INT(0))


def _build_deposit(
    past_cache: bool, context: Any, builder: Any, signature: Any, values: Any
) -> Any:
    *addresses, floor, given = values
    pointers = [builder.inttoptr(value, _FLOATS.as_pointer()) for value in addresses]
    left, right = builder.load(pointers[0]), builder.load(pointers[1])
    total = builder.fadd(left, right)
    size = builder.and_(builder.bitcast(total, _INTS), _INTS([int(MAGNITUDE)] * STRIPE))
    is_large = builder.icmp_unsigned(">=", size, _spread(builder, floor))
    is_bad = builder.icmp_unsigned(">=", size, _INTS([int(INFINITE)] * STRIPE))
    selection = builder.or_(is_large, builder.bitcast(given, _BITS))
    kept = builder.select(selection, _FLOATS([0.0] * STRIPE), total)
    sums, goal = builder.store(total, pointers[2]), builder.store(kept, pointers[3])
    left.align = right.align = sums.align = 4
    goal.align = 64 if past_cache else 4
    if past_cache:
        goal.set_metadata("nontemporal", builder.module.add_metadata([_INT(1)]))
    words = builder.bitcast(selection, _WORD), builder.bitcast(is_bad, _WORD)
    squares = _total(builder, builder.fmul(right, right))
    return context.make_tuple(builder, signature.return_type, (*words, squares))


_DEPOSIT = types.Tuple(  # type: ignore[no-untyped-call]
    (types.uint64, types.uint64, types.float32)
)(*[types.int64] * 4, types.uint32, types.uint64)


@_intrinsic
def deposit_stripe(
    _typing: Any, left: Any, right: Any, sums: Any, goal: Any, floor: Any, given: Any
) -> Any:
    """Write left + right to `sums`, and to `goal` with selected entries replaced by zero.

    An entry is selected if its magnitude reaches the floor or its bit is set in `given`. Returns a
    bit mask of selected entries, a bit mask of non-finite entries, and the sum of squares of
    `right`.
    """
    return _DEPOSIT, partial(_build_deposit, False)


@_intrinsic
def deposit_stripe_past_cache(
    _typing: Any, left: Any, right: Any, sums: Any, goal: Any, floor: Any, given: Any
) -> Any:
    """Do the same with non-temporal stores to `goal`, which must be aligned to 64 bytes."""
    return _DEPOSIT, partial(_build_deposit, True)


@_intrinsic
def copy_stripe_past_cache(_typing: Any, source: Any, goal: Any) -> Any:
    """Copy a stripe with non-temporal stores to an address aligned to 64 bytes."""

    def build(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        start, end = (builder.inttoptr(value, _FLOATS.as_pointer()) for value in values)
        stripe = builder.load(start)
        stripe.align = 4
        store = builder.store(stripe, end)
        store.align = 64
        store.set_metadata("nontemporal", builder.module.add_metadata([_INT(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@_intrinsic
def finish_writing(_typing: Any) -> Any:
    """Make non-temporal stores visible to other threads."""

    def build(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), build


@_intrinsic
def _pointer(_typing: Any, address: Any) -> Any:
    def build(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), build


@jit
def int64_at(address: int, length: Any) -> Array:
    """View memory as an array, so that a compiled loop can take any number of arrays."""
    return carray(_pointer(address), length, np.int64)


@jit
def float32_at(address: int, length: Any) -> Array:
    return carray(_pointer(address), length, np.float32)


@jit
def address(row: Array) -> Any:
    return np.int64(row.ctypes.data)
