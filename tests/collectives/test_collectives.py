"""Collectives: who is added to whom, in which order, and what it costs."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import sparsewire as sw
from sparsewire.codecs import ValueCodec
from sparsewire.collectives import Coding, Collective, CollectivePlan, Transfer
from sparsewire.counters import Counters
from sparsewire.message import FINE, REASONS, VALUES, Context
from sparsewire.requests import all_gather, all_to_all, broadcast, gather_traffic
from sparsewire.segments import Segments
from sparsewire.state import OWNED, RESIDUAL, StepState
from sparsewire.sums import CHUNK, chunk_sizes, ordered_sum, reduce_traffic, share_size
from sparsewire.workspace import Workspace

from ..laws.cases import LAWFUL, alone, examples, label, random_key

Entry = tuple[list[int], list[float]]  # indices and values


def plan_of(
    collective: Collective, segments: Segments, world_size: int, values: ValueCodec | None = None
) -> CollectivePlan:
    coding = Coding(sw.TopK(), sw.Int32(), values or sw.Float32())
    return collective.plan(coding, segments, world_size, torch.float32)


def meet(
    collective: Collective, entries: list[Entry], values: ValueCodec | None = None
) -> list[Transfer]:
    """Let every rank bring its entries of eight coordinates; how it ends for each of them."""
    world_size, count = len(entries), len(entries[0][0])
    segments = alone(sw.TopK(count=count), 8)
    transfers, routines = [], []
    for rank, (indices, numbers) in enumerate(entries):
        plan = plan_of(collective, segments, world_size, values)
        owned = plan.owned(rank)
        after = {RESIDUAL: torch.zeros(9), OWNED: torch.zeros(owned.size + 1 if owned else 0)}
        transfer = Transfer(
            Context(step=0, bucket=0, scheme=0, layout=0),
            random_key(0, rank),
            world_size,
            torch.zeros(8),
            StepState({}, after),
            [],
            Counters(),
            Workspace(),
            torch.tensor(FINE),
        )
        transfers.append(transfer)
        routines.append(plan.run((torch.tensor(indices), torch.tensor(numbers)), transfer))
    sw.groups.SimulatedGroup(world_size).drive(
        routines, [transfer.counters for transfer in transfers]
    )
    return transfers


def means(*arguments: Any) -> list[list[float]]:
    """The mean that every rank ends with, where nothing is wrong."""
    transfers = meet(*arguments)
    for transfer in transfers:
        assert transfer.corruption == transfer.non_finite == FINE
        assert not any(kept.any() for kept in transfer.state.after.values())
    return [transfer.gradient.tolist() for transfer in transfers]


def test_all_gather_adds_up_every_message() -> None:
    entries = [([0, 2], [4.0, 8.0]), ([1, 2], [6.0, 2.0])]
    assert means(sw.AllGather(), entries) == [[2, 3, 5, 0, 0, 0, 0, 0]] * 2


def test_all_reduce_adds_on_the_way_in_the_gradients_type() -> None:
    """257 is no bfloat16, the sum of two is: values travel narrow and are added wide."""
    entries = [([0, 2], [256.0, 8.0]), ([0, 2], [1.0, 2.0])]
    assert means(sw.AllReduce(), entries, sw.BFloat16()) == [[128.5, 0, 5, 0, 0, 0, 0, 0]] * 2


def test_owners_add_up_and_answer_all() -> None:
    entries = [([0, 2], [4.0, 8.0]), ([0, 2], [6.0, 2.0])]
    assert means(sw.Sharded(), entries) == [[5, 0, 5, 0, 0, 0, 0, 0]] * 2


@pytest.mark.parametrize("collective", examples("collectives"), ids=label)
def test_every_collective_adds_in_rank_order(collective: Collective) -> None:
    for numbers, total in (((4e8, 4.0, -4e8, 0.0), 0), ((4e8, -4e8, 4.0, 0.0), 1)):
        found = means(collective, [([1], [number]) for number in numbers])
        assert found == [[0, total, 0, 0, 0, 0, 0, 0]] * 4  # 1 is lost in 1e8


def test_sums_that_are_not_finite_are_damage() -> None:
    for bad in (math.nan, math.inf):
        for rank, transfer in enumerate(meet(sw.AllReduce(), [([3], [bad]), ([3], [1.0])])):
            assert divmod(int(transfer.corruption), len(REASONS)) == (rank, VALUES)


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
def test_shares_cover_all_values(count: int, world_size: int) -> None:
    share = share_size(count, world_size)
    assert share * world_size >= count
    assert (share - 1) * world_size < count or share == 0


@pytest.mark.parametrize(
    ("count", "world_size", "share"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (9, 1, 9)]
)
def test_shares_are_rounded_up(count: int, world_size: int, share: int) -> None:
    assert share_size(count, world_size) == share


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
    assert [gather_traffic(100, world_size) for world_size in (1, 2, 4)] == [0, 100, 300]
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


def test_plans_foretell_their_traffic() -> None:
    """100 of 1000 values, two bytes each, and as many indices of four bytes where they travel."""
    segments = alone(sw.TopK(count=100), 1000)
    traffic = {
        type(one): plan_of(one, segments, 4, sw.BFloat16()).traffic
        for one in (sw.AllGather(), sw.AllReduce(), sw.Sharded(1.0))
    }
    assert traffic[sw.AllGather] == 3 * (400 + 200 + 8)
    assert traffic[sw.AllReduce] == 528
    plan = plan_of(sw.Sharded(), segments, 4)
    assert plan.traffic == 3 * (plan.message_bytes["push"] + plan.message_bytes["pull"])
