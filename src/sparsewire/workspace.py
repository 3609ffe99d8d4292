"""What a rank keeps from step to step besides its state."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """One rank's buffers by name, and what it has compared with the others already.

    To allocate buffers anew costs more than to send them over a fast link. Losing a workspace on
    all ranks changes nothing.
    """

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.device], Tensor] = {}
        self.met: set[tuple[int, int]] = set()  # schemes and layouts whose headers were compared

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
