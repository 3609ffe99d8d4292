"""Fixtures: clusters of real processes that outlive a single test."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from sparsewire import kernels

from .cluster import Cluster, Host

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-golden", action="store_true", help="write the golden corpus anew"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Compile the kernels once, before many processes would do it at the same time.

    A shell lets what it starts in the background ignore Ctrl-C, and all that is started from there.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        kernels.prepare("cpu")


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
