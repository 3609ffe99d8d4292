"""What labs leave behind, for tests to see that it is nothing."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsewire.tools.lab import obstacle, records

from ...patience import patience

needs_lab = pytest.mark.skipif(obstacle() is not None, reason=obstacle() or "")


def namespaces(lab: str = "") -> set[str]:
    """The namespaces of one lab, or of all, that there are on this machine."""
    home = Path("/run/netns")
    names = os.listdir(home) if home.exists() else []
    return {name for name in names if re.match(f"sparsewire-{lab}", name)}


def _of_others() -> set[str]:
    """What belongs to labs of other processes that run."""
    kept = (one for one in records.read_all() if one.owned and one.pid != os.getpid())
    return {name for one in kept for name in one.plan.namespaces}


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    """Fails a test after which there is more than before, but for what others use."""
    before = namespaces()
    yield
    # Others come and go at any time; what this test left would stay.
    deadline = time.monotonic() + patience(10)
    while left := namespaces() - before - _of_others():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
