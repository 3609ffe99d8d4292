"""Memory that is kept from step to step."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """One rank's buffers, by name: to allocate them anew costs more than to send them over a fast
    link. Losing them changes nothing."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.device], Tensor] = {}

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
