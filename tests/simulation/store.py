"""The store of the ranks, which a process hosts: others get to it over the network."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import TypeVar

from .network import Network
from .world import Process

Result = TypeVar("Result")


class SimulatedStore:
    """One process's way to the store. Its calls block for as long as the host does not answer.

    Arguments:
        network: between this process and the host.
        process: which calls.
        host: which answers.
        notes: what is stored.
    """

    def __init__(
        self, network: Network, process: Process, host: Process, notes: dict[str, str]
    ) -> None:
        self._network = network
        self._world = network.world
        self._process = process
        self._host = host
        self._notes = notes

    def check(self, keys: list[str]) -> bool:
        return self._call(lambda: all(key in self._notes for key in keys))

    def get(self, key: str) -> bytes:
        return self._call(lambda: self._notes[key].encode())

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self._notes.__setitem__(key, value))

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        end = self._world.now + timeout.total_seconds()
        while not self.check(keys):
            if self._world.now > end:
                raise RuntimeError(f"wait timeout after {timeout}, keys: {keys}")
            self._world.sleep(0.2)

    def _call(self, action: Callable[[], Result]) -> Result:
        is_remote = self._process is not self._host
        self._sleep()
        self._pass(lambda: self._host.is_frozen or self._is_cut(self._process, self._host))
        result = action()
        if is_remote:
            self._pass(lambda: self._host.is_frozen or self._is_cut(self._host, self._process))
        self._sleep()
        return result

    def _is_cut(self, source: Process, target: Process) -> bool:
        return self._network.is_cut(source, target)

    def _pass(self, is_stuck: Callable[[], bool]) -> None:
        while is_stuck() and not self._host.is_dead:
            self._world.wait(self._world.changed)
        if self._host.is_dead:
            raise RuntimeError("Connection reset by peer")

    def _sleep(self) -> None:
        self._world.sleep(self._network.delay() / 4)
