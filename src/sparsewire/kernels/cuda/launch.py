"""Launches with little host overhead: Triton's own launcher inspects all arguments every time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .device import IS_INTERPRETED

_BIG = 1 << 31


class Arguments:
    """A kernel's arguments, and the properties that its compiled form depends on."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.plain: list[Any] = []  # tensors as addresses
        key: list[Any] = []
        _unwrap(args, self.plain, key)
        self.kind = _KINDS.setdefault(tuple(key), len(_KINDS))
        self.device: int | None = args[0].device.index


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel. Constants and options are passed by name."""
    again(kernel, grid, Arguments(*args), **options)


def again(kernel: Any, grid: tuple[int, ...], given: Arguments, **options: Any) -> None:
    """Launch a kernel on the device of its first argument, a tensor.

    A compiled kernel is reused for arguments of the same types and alignment.
    """
    options.setdefault("enable_fp_fusion", False)  # round products before they are added
    if IS_INTERPRETED:
        kernel[grid](*given.args, **options)
        return
    if given.device != torch.cuda.current_device():
        with torch.cuda.device(given.device):
            again(kernel, grid, given, **options)
        return
    key = (id(kernel), given.device, given.kind, *options.values())
    found = _COMPILED.get(key)
    if found is None:
        compiled = kernel[grid](*given.args, **options)
        constants = tuple(options[name] for name in kernel.arg_names[len(given.args) :])
        _COMPILED[key] = (compiled, constants)
        return
    compiled, constants = found
    compiled[(*grid, 1, 1)[:3]](*given.plain, *constants)


_KINDS: dict[tuple[Any, ...], int] = {}
_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def _unwrap(args: tuple[Any, ...], plain: list[Any], key: list[Any]) -> None:
    for arg in args:
        if isinstance(arg, Tensor):
            address = arg.data_ptr()
            plain.append(address)
            key.append((arg.dtype, address & 15))
        elif isinstance(arg, tuple):
            inner: list[Any] = []
            _unwrap(arg, inner, key)
            plain.append(tuple(inner))
        else:
            plain.append(arg)
            key.append((-_BIG <= arg < _BIG, arg % 16 == 0, arg == 1))
