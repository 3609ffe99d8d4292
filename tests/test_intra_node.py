"""Ranks of a machine find what belongs to another machine, as if it had arrived corrupt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.groups import SimulatedGroup
from sparsewire.intra_node import NOTE_BYTES
from sparsewire.requests import Request, Routine
from sparsewire.session import Session, Topology

LOCAL = 2  # ranks of a machine
ALL = slice(None)
NOTE, REST = slice(NOTE_BYTES), slice(NOTE_BYTES, None)
ROUNDS = {  # in their order
    "headers": ALL,
    "shares": ALL,
    "sums": ALL,
    "mean": REST,
    "buffers": REST,
    "found": ALL,
    "statuses": REST,
}


class Mixed(SimulatedGroup):
    """Two machines. In one round, ranks 0 and 1 get from each other what 2 and 3 did, `part` of it.

    `heard` is what these did get.
    """

    def __init__(self, heard: Sequence[Any] = (), mixed: int = -1, part: slice = ALL) -> None:
        pairs = [[0, 1], [2, 3]]
        super().__init__(4, intra_node=pairs, exchange=[[0, 2], [1, 3]], status=[[0, 2], [1, 3]])
        self.heard: list[list[Tensor]] = []
        self._instead = heard
        self._mixed, self._part = mixed, part
        self._number = 0  # of rounds in the first machine

    def carry(self, ranks: Sequence[int], requests: Sequence[Request]) -> list[Any]:
        answers = super().carry(ranks, requests)
        if requests[0].op == "broadcast":
            answers = [answers[0], answers[1].clone()]
            told = [answers[1]]
        else:
            answers = [[row.clone() for row in rows] for rows in answers]
            told = [answers[1][0], answers[0][1]]
        if tuple(ranks) == (2, 3):
            self.heard.append([each.clone() for each in told])
        elif tuple(ranks) == (0, 1):
            if self._number == self._mixed:
                for mine, others in zip(told, self._instead[self._number], strict=True):
                    mine[self._part] = others[self._part]
            self._number += 1
        return answers


def _step(session: Session) -> Routine[Tensor]:
    transaction = session.begin()
    unit = transaction.unit(0, {"w": (4, 5)}, torch.float32, torch.device("cpu"))
    unit.flat.fill_(1)
    yield from transaction.exchange(unit)
    yield from transaction.share(torch.arange(3, dtype=torch.uint8))
    yield from transaction.agree()
    return unit.flat


def _outcomes(group: Mixed) -> list[Any]:
    sessions = [
        Session(sw.parse("Dense()"), {"w": (4, 5)}, Topology(rank // LOCAL, 2, rank % LOCAL, LOCAL))
        for rank in range(4)
    ]
    counters = [session.counters for session in sessions]
    return group.outcomes([_step(session) for session in sessions], counters)


@pytest.mark.parametrize("round_", ROUNDS)
def test_a_message_of_another_machine_is_found(round_: str) -> None:
    """Both machines sum up the same numbers, so nothing but the checksum tells them apart."""
    plain = Mixed()
    assert all(torch.equal(mean, torch.ones(20)) for mean in _outcomes(plain))
    assert len(plain.heard) == len(ROUNDS)
    mixed = list(ROUNDS).index(round_)
    outcomes = _outcomes(Mixed(plain.heard, mixed, ROUNDS[round_]))
    reader = 0 if round_ == "found" else 1
    assert isinstance(outcomes[reader], sw.SparsewireError), outcomes
    if round_ in ("shares", "sums", "mean", "buffers"):  # those are compared with the statuses
        assert all(isinstance(each, sw.errors.CorruptMessageError) for each in outcomes)
        assert "of machine 0 that rank" in str(outcomes[3])


@pytest.mark.parametrize("round_", ["mean", "buffers", "statuses"])
def test_the_note_of_another_machine_is_found(round_: str) -> None:
    plain = Mixed()
    _outcomes(plain)
    error = _outcomes(Mixed(plain.heard, list(ROUNDS).index(round_), NOTE))[1]
    assert isinstance(error, sw.errors.ExchangeError)
    assert "what rank 0 of machine 0 told its machine at step 0, bucket 0" in str(error)
