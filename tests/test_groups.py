"""Groups of one process: alone, and simulated."""

from __future__ import annotations

import pytest
import torch

import sparsewire as sw
from sparsewire.groups import drive
from sparsewire.groups.distributed import DistributedGroup
from sparsewire.meter import Meter
from sparsewire.requests import Start, Wait, all_gather


def test_alone_answers_itself() -> None:
    group = sw.Alone()
    assert (group.rank, group.size) == (0, 1)
    payload = torch.arange(3, dtype=torch.uint8)
    (answer,) = group.wait(group.start(all_gather(payload)))
    assert torch.equal(answer, payload)


def test_driver_carries_requests_and_returns_the_verdict() -> None:
    def run():  # type: ignore[no-untyped-def]
        (answer,) = yield all_gather(torch.tensor([5], dtype=torch.uint8))
        return int(answer)

    meter = Meter()
    assert drive(run(), sw.Alone(), meter) == 5  # type: ignore[comparison-overlap]
    assert meter.seconds["exchange"] > 0
    assert meter.bytes_sent == 0


def test_several_requests_can_be_under_way() -> None:
    """And a payload may be written to again as soon as its request has been started."""

    def run(rank: int):  # type: ignore[no-untyped-def]
        payload = torch.tensor([rank], dtype=torch.uint8)
        first = yield Start(all_gather(payload))
        payload += 10
        second = yield Start(all_gather(payload))
        answers = []
        for ticket in (second, first):
            answers.append(torch.cat((yield Wait(ticket))).tolist())
        return answers

    meters = [Meter() for _ in range(3)]
    for answers in sw.SimulatedGroup(3).drive([run(rank) for rank in range(3)], meters):
        assert answers == [[10, 11, 12], [0, 1, 2]]
    assert [meter.bytes_sent for meter in meters] == [4, 4, 4]
    assert drive(run(0), sw.Alone(), Meter()) == [[10], [10]]  # nothing travels, nothing is copied


@pytest.mark.parametrize("size", [0, -1])
def test_simulated_group_needs_workers(size: int) -> None:
    with pytest.raises(sw.SchemeError, match="use at least 1"):
        sw.SimulatedGroup(size)


def test_simulated_workers_must_end_together() -> None:
    def run(requests: int):  # type: ignore[no-untyped-def]
        for _ in range(requests):
            yield all_gather(torch.zeros(1, dtype=torch.uint8))

    with pytest.raises(sw.DisagreementError, match="before the others"):
        sw.SimulatedGroup(2).drive([run(1), run(2)], [Meter(), Meter()])


def test_simulated_workers_are_counted() -> None:
    with pytest.raises(ValueError, match="zip"):
        sw.SimulatedGroup(2).drive([], [])


def test_process_group_must_be_initialised() -> None:
    with pytest.raises(sw.AttachError, match=r"init_process_group.*torchrun"):
        DistributedGroup()
