"""Groups of one process: alone, and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.counters import Counters
from sparsewire.groups import drive
from sparsewire.groups.distributed import DistributedGroup
from sparsewire.requests import (
    GroupName,
    Request,
    Routine,
    Start,
    Wait,
    all_gather,
    all_to_all,
    broadcast,
)


def one(number: int) -> Tensor:
    return torch.tensor([number], dtype=torch.uint8)


def all_counters(count: int) -> list[Counters]:
    return [Counters() for _ in range(count)]


def test_alone_answers_itself() -> None:
    group = sw.groups.Alone()
    assert (group.rank, group.size) == (0, 1)
    payload = torch.arange(3, dtype=torch.uint8)
    (answer,) = group.wait(group.start(all_gather(payload)))
    assert torch.equal(answer, payload)


def test_driver_carries_requests_and_returns_the_verdict() -> None:
    def run() -> Routine[int]:
        (answer,) = yield all_gather(one(5))
        return int(answer)

    counters = Counters()
    assert drive(run(), sw.groups.Alone(), counters) == 5
    assert counters.seconds["exchange"] > 0
    assert counters.bytes_sent == 0


def test_several_requests_can_be_under_way() -> None:
    """And a payload may be written to again as soon as its request has been started."""

    def run(rank: int) -> Routine[list[list[int]]]:
        payload = one(rank)
        first = yield Start(all_gather(payload))
        payload += 10
        second = yield Start(all_gather(payload))
        answers = []
        for ticket in (second, first):
            answers.append(torch.cat((yield Wait(ticket))).tolist())
        return answers

    counted = all_counters(3)
    for answers in sw.groups.SimulatedGroup(3).drive([run(rank) for rank in range(3)], counted):
        assert answers == [[10, 11, 12], [0, 1, 2]]
    assert [counters.bytes_sent for counters in counted] == [4, 4, 4]
    assert drive(run(0), sw.groups.Alone(), Counters()) == [
        [10],
        [10],
    ]  # nothing travels, nothing is copied


@pytest.mark.parametrize("size", [0, -1])
def test_simulated_group_needs_workers(size: int) -> None:
    with pytest.raises(sw.errors.SchemeError, match="at least 1 rank"):
        sw.groups.SimulatedGroup(size)


def test_simulated_workers_must_end_together() -> None:
    def run(requests: int) -> Routine[None]:
        for _ in range(requests):
            yield all_gather(one(0))

    with pytest.raises(sw.errors.DisagreementError, match="before the others"):
        sw.groups.SimulatedGroup(2).drive([run(1), run(2)], all_counters(2))


def test_simulated_workers_are_counted() -> None:
    with pytest.raises(ValueError, match="zip"):
        sw.groups.SimulatedGroup(2).drive([], [])


def test_every_request_is_answered_as_it_should_be() -> None:
    def run(rank: int) -> Routine[list[Any]]:
        gathered = yield all_gather(one(rank))
        rows = yield all_to_all(torch.stack([one(10 * rank), one(10 * rank + 1)]))
        spread = yield broadcast(one(rank), 1)
        return [torch.cat(gathered).tolist(), torch.cat(rows).tolist(), int(spread)]

    assert sw.groups.SimulatedGroup(2).drive([run(0), run(1)], all_counters(2)) == [
        [[0, 1], [0, 10], 1],
        [[0, 1], [1, 11], 1],
    ]


def test_ranks_talk_within_the_group_that_they_name() -> None:
    """And only what leaves a machine counts as traffic."""

    def run(rank: int) -> Routine[list[int]]:
        inside = yield all_gather(one(rank), group="intra_node")
        if rank % 2 == 0:
            leaders = yield all_gather(one(rank))
            inside = [*inside, *leaders]
        return torch.cat(inside).tolist()  # type: ignore[no-any-return]

    group = sw.groups.SimulatedGroup(4, intra_node=[[0, 1], [2, 3]], exchange=[[0, 2]])
    counted = all_counters(4)
    results = group.drive([run(rank) for rank in range(4)], counted)
    assert results == [[0, 1, 0, 2], [0, 1], [2, 3, 0, 2], [2, 3]]
    assert [counters.bytes_sent for counters in counted] == [1, 0, 1, 0]
    with pytest.raises(sw.errors.DisagreementError, match="rank 1 belongs to no group 'exchange'"):
        group.drive([all_alone("exchange") for _ in range(4)], all_counters(4))


def all_alone(group: GroupName) -> Routine[None]:
    yield all_gather(one(0), group=group)


def test_ranks_that_ask_different_groups_are_told() -> None:
    for end in (sw.groups.SimulatedGroup(2).drive, sw.groups.SimulatedGroup(2).outcomes):
        with pytest.raises(sw.errors.DisagreementError, match="different things"):
            raise end([all_alone("exchange"), all_alone("status")], all_counters(2))[0]  # type: ignore[misc]


def test_following_one_rank_breaks_off_the_others() -> None:
    ended = []

    def run(rank: int) -> Routine[int]:
        try:
            answer = yield all_gather(one(rank + 5))
            if rank == 0:
                return int(answer[1])
            yield all_gather(one(rank))
            return -1
        finally:
            ended.append(rank)

    runs = [run(0), run(1)]
    assert sw.groups.SimulatedGroup(2).follow(runs, all_counters(2)) == 6
    assert ended == [0, 1]


def test_who_waits_for_a_rank_that_ended_is_told() -> None:
    """As on a network: others go on, and may hear of it from those who were told."""

    def leader(node: int) -> Routine[str]:
        try:
            if node == 1:
                raise sw.errors.CorruptMessageError("node 1 is broken")
            yield all_gather(one(node))
        except sw.errors.ExchangeError as error:
            yield broadcast(one(7), 0, "intra_node")
            return str(error)
        return ""

    def follower() -> Routine[str]:
        told = yield broadcast(one(0), 0, "intra_node")
        return f"told {int(told)}"

    group = sw.groups.SimulatedGroup(4, intra_node=[[0, 1], [2], [3]], exchange=[[0, 2]])
    runs = [leader(0), follower(), leader(1), follower()]
    first, second, third, fourth = group.outcomes(runs, all_counters(4))
    assert first == "the exchange cannot continue: rank 2, 3 of 4 ended"
    assert second == "told 7"
    assert str(third) == "node 1 is broken"
    assert fourth == "told 0"


def test_what_a_group_carries_may_be_changed() -> None:
    class Louder(sw.groups.SimulatedGroup):
        def carry(self, ranks: Sequence[int], requests: Sequence[Request]) -> list[Any]:
            answers = super().carry(ranks, requests)
            return [[message + 1 for message in answer] for answer in answers]

    def run(rank: int) -> Routine[list[int]]:
        answer = yield all_gather(one(rank))
        return torch.cat(answer).tolist()  # type: ignore[no-any-return]

    assert Louder(2).drive([run(0), run(1)], all_counters(2)) == [[1, 2]] * 2


def test_process_group_must_be_initialised() -> None:
    with pytest.raises(sw.errors.AttachError, match=r"init_process_group.*torchrun"):
        DistributedGroup()
