"""Exchanging what an optimizer did to the weights, every H steps, now or one round late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsewire as sw
from sparsewire.groups.simulated import SimulatedGroup
from sparsewire.message import HEADER_BYTES
from sparsewire.requests import Request, Routine
from sparsewire.session import Session, Topology, Transaction

SHAPES = {"weight": (12, 20), "bias": (12,)}
WORLD = 3


class Replica:
    """One rank: its model and optimizer, and what it has computed and nobody else has seen."""

    def __init__(self, rank: int, scheme: sw.Scheme, every: int) -> None:
        torch.manual_seed(0)
        self.rank, self.every = rank, every
        self.model = nn.Linear(20, 12)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.session = Session(scheme, SHAPES, Topology(rank, WORLD))
        self.shared = self.weights()  # on which all ranks agree

    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def train(self, number: int) -> Tensor:
        """Take H steps of the user's own optimizer from the shared weights."""
        nn.utils.vector_to_parameters(self.shared.clone(), self.model.parameters())
        for step in range(self.every):
            generator = torch.Generator().manual_seed(1000 * number + 10 * step + self.rank)
            loss = self.model(torch.randn(8, 20, generator=generator)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return self.shared - self.weights()

    def exchange(self, update: Tensor) -> Routine[tuple[Transaction, Tensor]]:
        """Replace an update by the mean of all ranks' updates, or keep it for the next round."""
        transaction = self.session.begin()
        unit = transaction.unit("all", SHAPES, torch.float32, update.device)
        unit.flat.copy_(update)
        yield from transaction.exchange(unit)
        try:
            assert (yield from transaction.agree()) is None
        except sw.errors.CorruptMessageError:
            transaction.defer()
            return transaction, torch.zeros_like(update)
        transaction.commit()
        return transaction, unit.flat.clone()


class Line(SimulatedGroup):
    """Corrupts one byte of the first rank's message in the rounds that are named."""

    def __init__(self, bad: Sequence[int] = ()) -> None:
        super().__init__(WORLD)
        self.bad, self.round = bad, 0

    def carry(self, ranks: Sequence[int], requests: Sequence[Request]) -> list[Any]:
        is_message = requests[0].group == "exchange" and requests[0].payload.numel() != HEADER_BYTES
        if self.round in self.bad and is_message:
            payload = requests[0].payload.clone()
            payload.view(-1)[0] ^= 1
            requests = [replace(requests[0], payload=payload), *requests[1:]]
        return super().carry(ranks, requests)


def run(scheme: str, every: int, rounds: int, late: bool = False, line: Line | None = None) -> Any:
    """Return all replicas, and the sum of all updates that any of them computed."""
    line = line or Line()
    replicas = [Replica(rank, sw.parse(scheme), every) for rank in range(WORLD)]
    all_counters = [replica.session.counters for replica in replicas]
    computed, waiting = torch.zeros(252), [torch.zeros(252)] * WORLD
    for line.round in range(rounds):
        updates = [replica.train(line.round) for replica in replicas]
        computed += sum(updates)
        sent, waiting = (waiting, updates) if late else (updates, waiting)
        routines = [r.exchange(u) for r, u in zip(replicas, sent, strict=True)]
        for replica, (_, mean) in zip(replicas, line.drive(routines, all_counters), strict=True):
            replica.shared = replica.shared - mean
    return replicas, computed - sum(waiting)


@pytest.mark.parametrize("bad", [(), (1,), (1, 2)], ids=str)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("scheme", ["TopK(0.1)", "Dense()", "TopK(0.1), values=OneBit()"])
def test_what_was_computed_is_applied_or_still_to_come(
    scheme: str, every: int, late: bool, bad: tuple[int, ...]
) -> None:
    replicas, computed = run(
        f"Scheme({scheme}, dense_below=0, dense_1d=False)", every, 6, late, Line(bad)
    )
    start = Replica(0, sw.parse(scheme if "values" not in scheme else "Dense()"), 1).shared
    kept = sum(
        torch.cat([r.session.store.get(name)["residual"].reshape(-1) for name in SHAPES])
        for r in replicas
    )
    applied = WORLD * (start - replicas[0].shared)
    torch.testing.assert_close(applied + kept, computed, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(replica.shared, replicas[0].shared) for replica in replicas)
    assert replicas[0].session.steps == 6 - len(bad)
    assert applied.any()
