"""All of these tests share clusters of processes, so one test worker runs them all."""

from __future__ import annotations

from pathlib import Path

import pytest

collect_ignore = ["user_script.py"]  # is run, not imported

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("ranks"))
