"""Fixtures: clusters of real processes that outlive a single test."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Generator, Iterator

import pytest
import torch

from sparsewire import kernels

from .cluster import Cluster, Host
from .patience import patience

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-golden", action="store_true", help="write the golden corpus anew"
    )


def pytest_configure() -> None:
    """Set up what all processes that tests start inherit.

    A shell lets what it starts in the background ignore Ctrl-C, and all that is started from there.
    torch looks up the name of every address that it connects to, even 127.0.0.1: a name server that
    does not answer must cost less than the usual five seconds each time.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the kernels once, before many processes would do it at the same time.

    pytest-xdist starts its workers after this; they, and all processes that tests start, find the
    compiled kernels on disk.
    """
    if hasattr(session.config, "workerinput"):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: reporter.write_line(record.getMessage())  # type: ignore[method-assign]
    kernels.log.addHandler(handler)  # what it says if it takes long
    kernels.prepare("cpu")
    kernels.log.removeHandler(handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout looks
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Give a test more time while the machine is busy."""
    mark = item.get_closest_marker("timeout")
    seconds = mark.args[0] if mark else item.config.getoption("timeout")
    if seconds is None:
        seconds = float(item.config.getini("timeout"))
    item.add_marker(pytest.mark.timeout(patience(seconds)), append=False)
    return (yield)


class _Keeper:
    """Hands out a cluster of each size, anew after one has broken."""

    def __init__(self) -> None:
        self._clusters: dict[int, Cluster] = {}

    def get(self, size: int) -> Cluster:
        cluster = self._clusters.get(size)
        if cluster is None or not cluster.alive:
            if cluster is not None:
                cluster.stop()
            cluster = self._clusters[size] = Cluster(size)
        return cluster

    def stop(self) -> None:
        for cluster in self._clusters.values():
            cluster.stop()


@pytest.fixture(scope="session")
def _keeper() -> Iterator[_Keeper]:
    keeper = _Keeper()
    yield keeper
    keeper.stop()


@pytest.fixture
def four(_keeper: _Keeper) -> Cluster:
    """Four ranks."""
    return _keeper.get(4)


@pytest.fixture
def two(_keeper: _Keeper) -> Cluster:
    """Two ranks."""
    return _keeper.get(2)


@pytest.fixture
def fresh() -> Iterator[object]:
    """Makes clusters for tests that break them."""
    made: list[Cluster] = []

    def make(size: int, host: Host = "test") -> Cluster:
        made.append(Cluster(size, host))
        return made[-1]

    yield make
    for cluster in made:
        cluster.stop()
