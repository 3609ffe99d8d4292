"""A bounds checker for Triton's interpreter: kernels may touch only the tensors they were given.

A GPU reports an access outside all tensors only if no memory happens to be mapped there, so a
kernel that reads a little too far can run for months. Here every tensor gets its own range of
addresses, with unmapped ranges between them. Every load, store and atomic operation must stay
inside the tensor whose address it started from. This also covers addresses that a kernel writes to
a table and another kernel reads, and tensors that were freed in between.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from torch import Tensor

_RANGE = 1 << 40  # bytes of addresses per tensor, which begins in the middle
ACCESSES = ("create_masked_load", "create_masked_store", "create_atomic_cas", "create_atomic_rmw")
_ALIGNED = 512  # bytes: kernels see the real address modulo this


class OutOfBoundsError(Exception):
    """A kernel accessed memory outside the tensor that its address belongs to."""


@dataclass
class _Range:
    """The addresses of one tensor."""

    name: str  # the kernel and argument that got the tensor first
    tensor: weakref.ref[Tensor]
    start: int  # the address that the kernel sees
    nbytes: int


class Bounds:
    """Translates the addresses that kernels see, and checks every access.

    Attributes:
        launches: How often each kernel was launched.
        running: The kernel that runs.
    """

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.running = ""
        self._ranges: list[_Range] = []
        self._known: dict[tuple[int, int], _Range] = {}

    def open(self, tensor: Tensor, name: str) -> int:
        """Return the address that kernels see as the address of a tensor."""
        key = id(tensor), tensor.data_ptr()
        found = self._known.get(key)
        if found is None or found.tensor() is not tensor:
            start = len(self._ranges) * _RANGE + _RANGE // 2 + tensor.data_ptr() % _ALIGNED
            found = _Range(f"{name} of {self.running}", weakref.ref(tensor), start, _extent(tensor))
            self._ranges.append(found)
            self._known[key] = found
        return found.start

    def check(self, places: Any, mask: Any, nbytes: int) -> Any:
        """Return the real addresses of an access. Raise if it is outside, and not masked out."""
        places, mask = np.broadcast_arrays(places.view(np.int64), np.asarray(mask, dtype=bool))
        real = np.zeros(places.shape, np.int64)
        numbers = places // _RANGE
        for number in np.unique(numbers[mask]).tolist():
            if not 0 <= number < len(self._ranges):
                raise OutOfBoundsError(f"{self.running} used an address of no tensor")
            held = self._ranges[number]
            tensor = held.tensor()
            if tensor is None:
                raise OutOfBoundsError(f"{self.running} used {held.name}, which was freed")
            mine = mask & (numbers == number)
            offsets = places - held.start
            outside = mine & ((offsets < 0) | (offsets + nbytes > held.nbytes))
            if outside.any():
                raise OutOfBoundsError(
                    f"{self.running} accessed byte {offsets[outside][0]} of {held.name}, which has "
                    f"{held.nbytes} bytes; {outside.sum()} of {mine.sum()} accesses are outside"
                )
            real[mine] = offsets[mine] + tensor.data_ptr()
        return real.view(np.uint64)


def _extent(tensor: Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last."""
    if not tensor.numel():
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in pairs)) * tensor.element_size()


@contextmanager
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bounds]:
    """Check every access of the kernels that the interpreter runs meanwhile."""
    from triton.runtime import interpreter

    bounds, names = Bounds(), dict[int, str]()
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    launch, convert = executor.__call__, interpreter._implicit_cvt

    def note(arg: object, name: str) -> None:
        names[id(arg)] = name
        for number, inner in enumerate(arg) if isinstance(arg, tuple) else ():
            note(inner, f"{name}[{number}]")

    def call(self: Any, *args: Any, **options: Any) -> None:
        bounds.running = self.fn.__name__
        bounds.launches[bounds.running] += 1
        names.clear()
        for name, arg in zip(self.arg_names, args, strict=False):
            note(arg, name)
        launch(self, *args, **options)

    def converted(arg: Any) -> Any:
        made = convert(arg)
        if isinstance(arg, Tensor):
            made.handle.data[0] = bounds.open(arg, names[id(arg)])
        return made

    def checking(name: str) -> Callable[..., Any]:
        access = getattr(builder, name)
        order = list(inspect.signature(access).parameters)

        def check(*args: Any) -> Any:
            given = dict(zip(order, args, strict=True))
            pointers = given.get("ptrs", given.get("ptr"))
            mask = given["mask"].data if "mask" in given else True
            nbytes = pointers.get_element_ty().primitive_bitwidth // 8
            real = bounds.check(pointers.data, mask, nbytes)
            moved = interpreter.TensorHandle(real, pointers.dtype)
            return access(*(moved if arg is pointers else arg for arg in args))

        return check

    with monkeypatch.context() as patch:
        patch.setattr(executor, "__call__", call)
        # no copies, which would have other addresses in every launch
        patch.setattr(executor, "_init_args_hst", lambda self, args, options: (args, options))
        patch.setattr(executor, "_restore_args_dev", lambda *_: None)
        patch.setattr(interpreter, "_implicit_cvt", converted)
        for name in ACCESSES:
            patch.setattr(builder, name, checking(name))
        yield bounds
