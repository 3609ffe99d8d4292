"""What labs leave behind, for tests to see that it is nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsewire.lab import obstacle, running

needs_lab = pytest.mark.skipif(obstacle() is not None, reason=obstacle() or "")


def namespaces(lab: str = "") -> set[str]:
    """The namespaces of one lab, or of all, that there are on this machine."""
    home = Path("/run/netns")
    names = os.listdir(home) if home.exists() else []
    return {name for name in names if re.match(f"sparsewire-{lab}", name)}


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    """Fails a test after which there is more than before, but for what others use."""
    before = namespaces()
    yield
    others = {plan.id for plan in running()}
    left = {name for name in namespaces() - before if name.split("-")[1] not in others}
    assert not left
