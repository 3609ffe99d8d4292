"""No thread stays inside the backend once its rank has given up: it would abort the process."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

import sparsewire as sw
from sparsewire.groups.connection import Connection
from sparsewire.groups.environment import Environment
from sparsewire.groups.liveness import Liveness
from sparsewire.groups.transport import Transport, _All


class Stuck(Work):
    """A collective that never ends."""

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        assert timeout is not None, "this wait has no end"
        raise RuntimeError("Timed out")

    def is_completed(self) -> bool:
        return False


def _transport(is_given_up: Callable[[], bool]) -> Transport:
    transport = Transport.__new__(Transport)
    transport._is_gloo, transport._is_given_up = True, is_given_up
    return transport


def _after_three_looks() -> Callable[[], bool]:
    looks = itertools.count()
    return lambda: next(looks) > 3


def test_waits_end_when_they_are_given_up() -> None:
    transport = _transport(lambda: False)
    works: tuple[Any, ...] = (Stuck(), _All([Stuck(), Stuck()]))
    for work in works:
        assert not transport.wait(work, _after_three_looks())


def test_the_first_collective_is_given_up_as_well() -> None:
    """It runs on a thread that is left behind when the deadline of `attach` has passed."""

    def begin(output: Tensor, probe: Tensor) -> Any:
        return Stuck()

    transport, empty = _transport(_after_three_looks()), torch.empty(0)
    with pytest.raises(RuntimeError, match="nobody waits"):
        transport._first_of((begin, begin), empty, empty)


class Impatient(Environment):
    """Nothing ends in time."""

    def within(self, seconds: float, call: Callable[[], Any]) -> Any:
        raise TimeoutError


def test_who_waits_no_longer_tells_the_thread_that_is_left_behind() -> None:
    liveness = Liveness(0, 2, 1.0, Impatient())
    connection = Connection(0, 2, liveness, torch.device("cpu"))
    with pytest.raises(sw.errors.ExchangeError, match="it took more than 6 seconds"):
        connection.limited(lambda: None)
    assert liveness.given_up
