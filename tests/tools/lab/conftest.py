"""Every test here is watched for what it leaves behind."""

from __future__ import annotations

import pytest

from .traces import nothing_stays  # noqa: F401


@pytest.fixture(autouse=True)
def _watched(nothing_stays: None) -> None:  # noqa: F811
    """Applies to all tests of this folder."""
