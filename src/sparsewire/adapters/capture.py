"""CUDA graphs: work that is the same at every step, recorded once and launched as one."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

log = logging.getLogger("sparsewire.capture")

EAGER = 2  # calls before the capture, in which kernels are compiled and tables made


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream beside those there are."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Captured:
    """A function that always works on the same tensors: called twice, then captured and replayed.

    What it does must not depend on numbers that the host knows and changes. On a CPU, and where it
    cannot be captured, it is called every time, which is slower and does the same.
    """

    def __init__(self, function: Callable[[], object], device: torch.device) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._eager = EAGER if device.type == "cuda" else -1  # calls left; -1: for ever
        self._stream = new_stream(device) if device.type == "cuda" else None

    @property
    def is_captured(self) -> bool:
        """Whether calls are replays by now."""
        return self._graph is not None

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif self._eager:
            self._eager -= self._eager > 0
            self._call()
        else:
            self._capture()

    def _call(self) -> None:
        """Call it, on CUDA on the stream on which it will be captured, as torch asks for."""
        if self._stream is None:
            self._function()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._function()
        torch.cuda.current_stream().wait_stream(self._stream)

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._function()
        except RuntimeError as error:
            log.warning("not captured, so slower: %s", str(error).partition("\n")[0])
            self._eager = -1
            self._call()
        else:
            self._graph = graph
            graph.replay()
