"""CUDA graphs: capture work that is the same at every step, and replay it in one launch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import torch

log = logging.getLogger("sparsewire.capture")

EAGER = 2  # calls before the capture, to compile kernels and make tables


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a new stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Captured:
    """A function on fixed tensors that is called twice, then captured and replayed.

    It must not depend on values that change on the host. On a CPU, or if the capture fails, it is
    called every time, with the same result.
    """

    def __init__(self, function: Callable[[], object], device: torch.device) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._eager = EAGER if device.type == "cuda" else -1  # calls left; -1: never capture
        self._device = device

    @property
    def is_captured(self) -> bool:
        """Whether calls are replays."""
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
        """Call the function; on CUDA on a side stream, as torch requires before a capture."""
        with self._aside():
            self._function()

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with self._aside() as stream, torch.cuda.graph(graph, stream=stream):
                self._function()
        except RuntimeError as error:
            log.warning("not captured, so slower: %s", str(error).partition("\n")[0])
            self._eager = -1
            self._call()
        else:
            self._graph = graph
            graph.replay()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[torch.cuda.Stream | None]:
        """Switch to a stream that is not the default one, on CUDA."""
        if self._device.type != "cuda":
            yield None
            return
        current = torch.cuda.current_stream(self._device)
        if current != torch.cuda.default_stream(self._device):
            yield current
            return
        stream = new_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield stream
        current.wait_stream(stream)
