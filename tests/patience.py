"""How long tests wait. A limit is there so that a hang fails, not to measure how fast things are.

`conftest` gives every test one limit, so a wait needs none of its own, unless the test is about how
long it takes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
MOST = 10.0  # beyond that the machine cannot be used anyway, and a hang must still fail


def stretch() -> float:
    """Return how many processes share a core now: about how much longer everything takes."""
    return min(max(1.0, os.getloadavg()[0] / CORES), MOST)


def patience(seconds: float) -> float:
    """Return a limit that would be `seconds` on an idle machine."""
    return seconds * stretch()


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds."""
    end = time.monotonic() + patience(100)
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@contextmanager
def telling(file: Path) -> Iterator[None]:
    """Create `file` when the block ends, however it ends: another process waits for it."""
    try:
        yield
    finally:
        file.touch()
