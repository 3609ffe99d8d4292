"""Tests of this folder play many schedules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .schedule import many


@pytest.fixture(autouse=True)
def _many_schedules() -> Iterator[None]:
    with many():
        yield
