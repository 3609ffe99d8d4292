"""Buffers and tables that a rank keeps from step to step for speed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")


class Workspace:
    """One rank's buffers by name, the tables of its kernels, and the headers compared so far.

    Allocating a buffer costs more than sending it over a fast link. Losing a workspace on all ranks
    changes no result. Only one thread may use it at a time.
    """

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.device], Tensor] = {}
        self.met: set[tuple[int, int]] = set()  # schemes and layouts whose headers were compared
        self._kept: dict[tuple[int, Hashable], tuple[object, Any]] = {}  # beside its owner

    def buffer(self, name: str, nbytes: int, device: torch.device) -> Tensor:
        """Return `nbytes` of uninitialised memory, the same as last time if it is large enough."""
        held = self.buffers.get((name, device))
        if held is None or held.numel() < nbytes:
            held = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.buffers[name, device] = held
        return held[:nbytes]

    def clear(self) -> None:
        """Drop all buffers, because an interrupted operation may still write into them."""
        self.buffers.clear()

    def kept(self, owner: object, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the result of `make`, which is called once for this owner and key."""
        place = id(owner), key
        if place not in self._kept:
            self._kept[place] = owner, make()  # the owner too, so that nobody else gets its id
        made: Made = self._kept[place][1]
        return made

    def forget(self) -> None:
        """Drop everything that is kept, because some of the owners are no longer needed."""
        self._kept.clear()

    def __getstate__(self) -> dict[str, Any]:
        """A copy knows only which headers were compared. It shares no buffers and no tables."""
        return {"buffers": {}, "met": set(self.met), "_kept": {}}
