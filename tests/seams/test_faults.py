"""A rank that crashes, and a message that only one rank receives corrupt, among simulated ranks."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.groups.simulated import SimulatedGroup
from sparsewire.message import HEADER_BYTES
from sparsewire.requests import Request, Routine, Step
from sparsewire.session import Session, Topology

SHAPES = {"weight": (40, 50), "bias": (40,)}
FLAT = {"exchange": [[0, 1, 2, 3]]}
MACHINES = {"intra_node": [[0, 1], [2, 3]], "exchange": [[0, 2]], "status": [[0, 2]]}


class Network(SimulatedGroup):
    """Four ranks; what goes from rank 0 to rank 2 arrives changed while `is_bad`."""

    is_bad = False

    def carry(self, ranks: Sequence[int], requests: Sequence[Request]) -> list[Any]:
        answers = super().carry(ranks, requests)
        first = requests[0]
        is_message = first.op == "all_gather" and first.payload.numel() != HEADER_BYTES
        if self.is_bad and first.group == "exchange" and is_message:
            received = [payload.clone() for payload in answers[ranks.index(2)]]
            received[0][20] ^= 64
            answers[ranks.index(2)] = received
        return answers


class Cluster:
    def __init__(self, machines: bool) -> None:
        self.network = Network(4, **(MACHINES if machines else FLAT))
        places = [Topology(r // 2, 2, r % 2, 2) if machines else Topology(r, 4) for r in range(4)]
        self.sessions = [Session(sw.parse("TopK(0.1)"), SHAPES, place) for place in places]

    def routine(self, rank: int, number: int) -> Routine[Tensor]:
        transaction = self.sessions[rank].begin()
        unit = transaction.unit(0, SHAPES, torch.float32, torch.device("cpu"))
        generator = torch.Generator().manual_seed(10 * number + rank)
        unit.flat.copy_(torch.randn(unit.flat.numel(), generator=generator))
        yield from transaction.exchange(unit)
        assert (yield from transaction.agree()) is None
        transaction.commit()
        return unit.flat.clone()

    def step(self, number: int, crash: tuple[int, int] | None = None) -> list[Any]:
        routines = [self.routine(rank, number) for rank in range(4)]
        if crash is not None:
            routines[crash[0]] = _until(routines[crash[0]], crash[1])
        return self.network.outcomes(routines, [session.counters for session in self.sessions])

    def kept(self) -> list[Tensor]:
        return [s.store.get("weight")["residual"].clone() for s in self.sessions if s.store.fields]


def _until(routine: Routine[Any], requests: int) -> Generator[Step, Any, Any]:
    """Crash after so many requests."""
    answer = None
    for _ in range(requests):
        answer = yield routine.send(answer)
    raise sw.errors.ExchangeError("killed")


@pytest.mark.parametrize("machines", [False, True])
def test_corruption_that_one_rank_sees_stops_the_step_on_all(machines: bool) -> None:
    cluster, undisturbed = Cluster(machines), Cluster(machines)
    cluster.step(0)
    before = cluster.kept()
    cluster.network.is_bad = True
    outcomes = cluster.step(1)
    assert all(isinstance(outcome, sw.errors.CorruptMessageError) for outcome in outcomes)
    place = "machine" if machines else "rank"
    found = f"the message of {place} 0 that {place}"
    assert all(found in str(outcome) for outcome in outcomes)
    assert all(torch.equal(now, then) for now, then in zip(cluster.kept(), before, strict=True))
    cluster.network.is_bad = False
    undisturbed.step(0)
    for mean, expected in zip(cluster.step(1), undisturbed.step(1), strict=True):
        assert torch.equal(mean, expected)


class Unknown(sw.errors.ExchangeError):
    """An error of a kind that followers do not know."""


@pytest.mark.parametrize(
    "kind",
    [Unknown, *(e for e in vars(sw.errors).values() if isinstance(e, type))],
)
def test_every_error_of_a_leader_is_told_to_its_machine(kind: type[sw.SparsewireError]) -> None:
    cluster = Cluster(machines=True)

    def fail(*_: object) -> Any:
        raise kind("no room left")

    cluster.sessions[2].store.open = fail  # type: ignore[method-assign]
    outcomes = cluster.step(0)
    known = kind if kind is not Unknown else sw.errors.ExchangeError
    assert [type(outcomes[2]), type(outcomes[3])] == [kind, known]
    assert [str(outcome) for outcome in outcomes[2:]] == ["no room left"] * 2
    assert all(isinstance(outcome, sw.errors.ExchangeError) for outcome in outcomes[:2])


@pytest.mark.parametrize("requests", range(3))
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("machines", [False, True])
def test_no_rank_waits_for_one_that_crashed(machines: bool, rank: int, requests: int) -> None:
    cluster = Cluster(machines)
    cluster.step(0)
    before = cluster.kept()
    outcomes = cluster.step(1, crash=(rank, requests))
    assert all(isinstance(outcome, sw.errors.ExchangeError) for outcome in outcomes)
    assert all(torch.equal(now, then) for now, then in zip(cluster.kept(), before, strict=True))
