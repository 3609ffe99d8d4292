"""Collectives: who is added to whom, in which order, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import sparsewire as sw
from sparsewire.collectives import Collective
from sparsewire.collectives.sums import (
    CHUNK,
    Total,
    chunk_sizes,
    ordered_sum,
    reduce_traffic,
    share_size,
)
from sparsewire.groups.simulated import SimulatedGroup
from sparsewire.message import FINE, Context
from sparsewire.meter import Meter
from sparsewire.requests import all_gather, all_to_all, broadcast, gather_traffic
from sparsewire.workspace import Workspace

from .laws.cases import LAWFUL, examples, label

CONTEXT = Context(step=0, bucket=0, scheme=0, layout=0)


@dataclass
class Notebook:
    """A desk that writes down what it is handed."""

    rank: int
    world: int
    context: Context = CONTEXT
    meter: Meter = field(default_factory=Meter)
    work: Workspace = field(default_factory=Workspace)
    added: list[tuple[list[int], list[float]]] = field(default_factory=list)

    @property
    def share(self) -> float:
        return 1 / self.world

    def write(self, indices: Tensor, values: Tensor) -> Tensor:
        return torch.cat([indices.to(torch.float32), values]).view(torch.uint8)

    def read(self, messages: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        numbers = [message.view(torch.float32) for message in messages]
        halves = [number.numel() // 2 for number in numbers]
        return [(n[:h].long(), n[h:]) for n, h in zip(numbers, halves, strict=True)]

    def check(self, total: Total) -> Tensor:
        assert total.damage == FINE
        return total.values

    def narrow(self, indices: Tensor, values: Tensor) -> Tensor:
        return values.to(torch.bfloat16)

    def apply(self, entries: Sequence[tuple[Tensor, Tensor]], share: float) -> None:
        self.added += [(indices.tolist(), (share * v).tolist()) for indices, v in entries]

    def push(self, indices: Tensor, values: Tensor) -> Tensor:
        """Everything to everybody: this desk does not know who owns what."""
        return self.write(indices, values).repeat(self.world, 1)

    def settle(self, messages: Sequence[Tensor]) -> Tensor:
        entries = self.read(messages)
        total = ordered_sum([values for _, values in entries], torch.float32, self.share)
        return self.write(entries[0][0], total)

    def pull(self, messages: Sequence[Tensor]) -> None:
        self.apply(self.read(messages), 1.0)


def meet(collective: Collective, entries: list[tuple[list[int], list[float]]]) -> list[Notebook]:
    """Let every rank bring its entries; what each of them was handed."""
    world = len(entries)
    desks = [Notebook(rank, world) for rank in range(world)]
    routines = [
        collective.meet(torch.tensor(indices), torch.tensor(values), desk)
        for (indices, values), desk in zip(entries, desks, strict=True)
    ]
    SimulatedGroup(world).drive(routines, [desk.meter for desk in desks])
    return desks


def test_all_gather_adds_every_message_in_rank_order() -> None:
    for desk in meet(sw.AllGather(), [([0, 2], [4.0, 8.0]), ([1, 2], [6.0, 2.0])]):
        assert desk.added == [([0, 2], [2.0, 4.0]), ([1, 2], [3.0, 1.0])]


def test_all_reduce_adds_on_the_way_in_the_ledgers_type() -> None:
    """257 is no bfloat16, the sum of two is: values travel narrow and are added wide."""
    for desk in meet(sw.AllReduce(), [([0, 2], [256.0, 8.0]), ([0, 2], [1.0, 2.0])]):
        assert desk.added == [([0, 2], [128.5, 5.0])]


@pytest.mark.parametrize("collective", examples("collectives"), ids=label)
def test_every_rank_is_handed_the_same(collective: Collective) -> None:
    entries = [([0, 1, 5], [0.1 * rank, 0.7, -rank / 3]) for rank in range(5)]
    first, *others = meet(collective, entries)
    assert all(other.added == first.added for other in others)


def test_owners_add_up_in_rank_order_and_answer_all() -> None:
    for desk in meet(sw.Sharded(), [([0, 2], [4.0, 8.0]), ([0, 2], [6.0, 2.0])]):
        assert desk.added == [([0, 2], [5.0, 5.0])] * 2


def test_sums_run_in_rank_order() -> None:
    parts = [torch.tensor([x]) for x in (1e8, 1.0, -1e8)]
    assert ordered_sum(parts, torch.float32).tolist() == [0.0]
    assert ordered_sum([parts[0], parts[2], parts[1]], torch.float32).tolist() == [1.0]
    assert ordered_sum(parts, torch.float64).tolist() == [1.0]


def test_sums_leave_their_parts_alone() -> None:
    parts = [torch.ones(2), torch.ones(2)]
    assert ordered_sum(parts, torch.float32).tolist() == [2, 2]
    assert parts[0].tolist() == [1, 1]


@given(st.integers(0, 10**9), st.integers(1, 1000))
@LAWFUL
def test_shares_cover_all_values(count: int, world: int) -> None:
    share = share_size(count, world)
    assert share * world >= count
    assert (share - 1) * world < count or share == 0


@pytest.mark.parametrize(
    ("count", "world", "share"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (9, 1, 9)]
)
def test_shares_are_rounded_up(count: int, world: int, share: int) -> None:
    assert share_size(count, world) == share


class Fixed:
    """Sizes that say where they come from."""

    message_bytes = 100
    value_count = 100
    value_width = 2
    sum_width = 4

    def push_bytes(self, world: int) -> int:
        return 10 * world

    def pull_bytes(self, world: int) -> int:
        return 20 * world


@given(st.integers(0, 10**9))
@LAWFUL
def test_chunks_cover_all_values(count: int) -> None:
    *full, last = chunk_sizes(count)
    assert sum(full) + last == count
    assert set(full) <= {CHUNK}
    assert 0 < last <= CHUNK or count == 0


@pytest.mark.parametrize(("count", "chunks"), [(0, 1), (1, 1), (CHUNK, 1), (CHUNK + 1, 2)])
def test_small_sums_are_not_cut(count: int, chunks: int) -> None:
    assert len(chunk_sizes(count)) == chunks


def test_traffic() -> None:
    assert [gather_traffic(100, world) for world in (1, 2, 4)] == [0, 100, 300]
    # each of 4 ranks sends 3 shares of 25 narrow values in 7 words, then its sum in 13 to 3 others,
    # all with a digest
    assert reduce_traffic(100, 2, 4, 4) == 3 * 8 * (7 + 1) + 3 * 8 * (13 + 1) == 528
    assert reduce_traffic(100, 2, 4, 1) == 0
    # a full chunk ahead of these has digests of its own
    full = 3 * (2 * CHUNK // 4 + 8) + 3 * (4 * CHUNK // 4 + 8)
    assert reduce_traffic(CHUNK + 100, 2, 4, 4) == full + 528
    assert all_gather(torch.zeros(100, dtype=torch.uint8)).traffic(4) == 300
    assert all_to_all(torch.zeros(4, 25, dtype=torch.uint8)).traffic(4) == 75
    assert broadcast(torch.zeros(100, dtype=torch.uint8), 0).traffic(4) == 75
    assert sw.AllGather().traffic(Fixed(), 4) == 300
    assert sw.AllReduce().traffic(Fixed(), 4) == 528
    assert sw.Sharded().traffic(Fixed(), 4) == 3 * (4 * 10 + 4 * 20)
