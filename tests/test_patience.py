"""Limits stretch with the load, every test has one, and what must not run at once does not."""

from __future__ import annotations

import os

import pytest

from . import patience
from .patience import CORES, MOST


@pytest.mark.parametrize(
    ("load", "stretched"), [(0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (3.0, 3.0), (1000.0, MOST)]
)
def test_limits_stretch_with_the_load_per_core(
    monkeypatch: pytest.MonkeyPatch, load: float, stretched: float
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load * CORES, 0.0, 0.0))
    assert patience.patience(20) == 20 * stretched


@pytest.fixture
def limit(request: pytest.FixtureRequest) -> float:
    """The seconds that pytest-timeout gives a test."""
    mark = request.node.get_closest_marker("timeout")
    assert mark is not None
    return float(mark.args[0])


def test_every_test_has_a_limit(limit: float, request: pytest.FixtureRequest) -> None:
    usual = request.config.getoption("timeout") or float(request.config.getini("timeout"))
    assert usual <= limit <= MOST * usual


@pytest.mark.timeout(777)
def test_a_limit_of_its_own_stretches_as_well(limit: float) -> None:
    assert 777 <= limit <= MOST * 777


@pytest.mark.xdist_group("lab")
def test_groups_of_tests_hold(request: pytest.FixtureRequest) -> None:
    """pytest-xdist tells them by their names, where it sees them."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("needs --dist loadgroup")
    assert request.node.nodeid.endswith("@lab")
