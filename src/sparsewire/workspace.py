"""What a rank keeps from step to step besides its state; losing it changes no result."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")


class Workspace:
    """One rank's buffers by name, what kernels keep for the gradients that they work on, and what
    it has compared with the others already.

    To allocate buffers anew costs more than to send them over a fast link. Losing a workspace on
    all ranks changes nothing. It is used by one thread at a time.
    """

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.device], Tensor] = {}
        self.met: set[tuple[int, int]] = set()  # schemes and layouts whose headers were compared
        self._kept: dict[tuple[int, Hashable], tuple[object, Any]] = {}  # beside its owner

    def buffer(self, name: str, nbytes: int, device: torch.device) -> Tensor:
        """Return `nbytes` of uninitialised memory, the same as last time if there is enough."""
        held = self.buffers.get((name, device))
        if held is None or held.numel() < nbytes:
            held = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.buffers[name, device] = held
        return held[:nbytes]

    def clear(self) -> None:
        """Let go of all buffers, because something that was broken off may still write there."""
        self.buffers.clear()

    def kept(self, owner: object, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what `make` returned when it was first needed for this very owner and key."""
        place = id(owner), key
        if place not in self._kept:
            self._kept[place] = owner, make()  # the owner too, so that nobody else gets its id
        made: Made = self._kept[place][1]
        return made

    def forget(self) -> None:
        """Let go of all that is kept, because some of the owners are needed no longer."""
        self._kept.clear()

    def __getstate__(self) -> dict[str, Any]:
        """A copy only knows what was compared: buffers are no two's, and owners will be others."""
        return {"buffers": {}, "met": set(self.met), "_kept": {}}
