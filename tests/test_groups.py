"""Groups of one process: alone, and simulated."""

from __future__ import annotations

import pytest
import torch

import sparsewire as sw
from sparsewire.collectives import Gather, Reduce
from sparsewire.groups import drive
from sparsewire.groups.distributed import DistributedGroup
from sparsewire.message import FINE, Context
from sparsewire.meter import Meter

CONTEXT = Context(step=0, bucket=0, scheme=0, layout=0)


def test_alone_answers_itself() -> None:
    group = sw.Alone()
    assert (group.rank, group.size) == (0, 1)
    payload = torch.arange(3, dtype=torch.uint8)
    (answer,) = group.answer(Gather(payload))
    assert torch.equal(answer, payload)
    total = group.answer(Reduce(torch.ones(2, dtype=torch.bfloat16), torch.float32, CONTEXT))
    assert (total.values.dtype, total.values.tolist()) == (torch.float32, [1, 1])
    assert total.damage == FINE


def test_driver_carries_requests_and_returns_the_verdict() -> None:
    def run():  # type: ignore[no-untyped-def]
        (answer,) = yield Gather(torch.tensor([5], dtype=torch.uint8))
        return int(answer)

    meter = Meter()
    assert drive(run(), sw.Alone(), meter) == 5  # type: ignore[comparison-overlap]
    assert meter.seconds["exchange"] > 0
    assert meter.bytes_sent == 0


@pytest.mark.parametrize("size", [0, -1])
def test_simulated_group_needs_workers(size: int) -> None:
    with pytest.raises(sw.SchemeError, match="use at least 1"):
        sw.SimulatedGroup(size)


def test_simulated_workers_must_end_together() -> None:
    def run(requests: int):  # type: ignore[no-untyped-def]
        for _ in range(requests):
            yield Gather(torch.zeros(1, dtype=torch.uint8))

    with pytest.raises(sw.DisagreementError, match="before the others"):
        sw.SimulatedGroup(2).drive([run(1), run(2)], [Meter(), Meter()])


def test_simulated_workers_are_counted() -> None:
    with pytest.raises(ValueError, match="zip"):
        sw.SimulatedGroup(2).drive([], [])


def test_process_group_must_be_initialised() -> None:
    with pytest.raises(sw.AttachError, match=r"init_process_group.*torchrun"):
        DistributedGroup()
