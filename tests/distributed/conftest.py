"""Tests of one file that share clusters of processes are run by one test worker."""

from __future__ import annotations

from pathlib import Path

import pytest

collect_ignore = ["user_script.py"]  # is run, not imported

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("test_*.py"))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        shares = {"two", "four"}.intersection(getattr(item, "fixturenames", ()))
        if HERE in item.path.parents and shares:
            number = FILES.index(item.path) % 2  # two workers, each with clusters of its own
            item.add_marker(pytest.mark.xdist_group(f"ranks {number}"))
