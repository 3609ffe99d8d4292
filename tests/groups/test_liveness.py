"""Deadlines, alarms and roll calls under a virtual clock, without threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sparsewire.errors import ExchangeError, SparsewireError
from sparsewire.groups import liveness, thread
from sparsewire.groups.environment import Environment, Result
from sparsewire.groups.liveness import GRACE, LIMIT, PATIENCE, Liveness
from sparsewire.groups.thread import LINGER, Watch


class Board:
    """A store in this process. It may be frozen, which a limited call notices, or gone."""

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self.fault: type[Exception] | None = None

    def _touch(self) -> None:
        if self.fault is not None:
            raise self.fault("no store")

    def check(self, keys: list[str]) -> bool:
        self._touch()
        return all(key in self.notes for key in keys)

    def get(self, key: str) -> bytes:
        self._touch()
        return self.notes[key].encode()

    def set(self, key: str, value: str) -> None:
        self._touch()
        self.notes[key] = value


class World:
    """Ranks that share a clock and a store. While one sleeps, the others look for reports."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.now = 1000.0
        self.board = Board()
        self.asleep: set[int] = set()  # ranks that look at nothing: dead, stopped, or asking
        self.errors: dict[int, SparsewireError] = {}
        self.ranks = [self._rank(rank, size, timeout) for rank in range(size)]
        self.watches = [Watch(rank, self._note(number)) for number, rank in enumerate(self.ranks)]
        for rank in self.ranks:
            rank.arrive(self.board)
            rank.progress.enter("finished")

    def _rank(self, rank: int, size: int, timeout: float) -> Liveness:
        world = self

        class Virtual(Environment):
            def now(self) -> float:
                return world.now

            def sleep(self, seconds: float) -> None:
                world.now += seconds
                world.asleep.add(rank)
                for other, watch in enumerate(world.watches):
                    if other not in world.asleep and watch.broken is None:
                        watch.check_reports()
                world.asleep.discard(rank)

            def within(self, seconds: float, call: Callable[[], Result]) -> Result:
                return call()

        return Liveness(rank, size, timeout, Virtual())

    def _note(self, rank: int) -> Callable[[SparsewireError], None]:
        return lambda error: self.errors.update({rank: error})

    def begin(self, *ranks: int, what: str = "the exchange of step 7, bucket 0") -> None:
        """Let these ranks begin an exchange, in which they wait for the others."""
        for rank in ranks:
            self.ranks[rank].progress.begin(what)
            self.ranks[rank].progress.enter("waiting")

    def finish(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].progress.enter("finished")

    def message(self, rank: int) -> str:
        return str(self.errors[rank])


def test_the_deadline_breaks_an_exchange_and_nothing_else() -> None:
    world = World(2)
    world.now += 500
    world.watches[0].check_deadline()
    world.begin(0, 1)
    world.now += 60 + GRACE
    world.watches[0].check_deadline()
    assert not world.errors
    world.finish(1)
    world.now += 0.1
    for watch in world.watches:
        watch.check_deadline()
    assert "nothing moved for 65 seconds" in world.message(0)
    assert "give it more than timeout=60" in world.message(0)
    assert "reported by rank 0: nothing moved" in world.message(1)


def test_a_rank_that_begins_nothing_is_named() -> None:
    world = World(4)
    last = "the exchange of step 6, bucket 1"
    world.begin(0, 1, 2, 3, what=last)
    world.finish(0, 1, 2, 3)
    world.begin(0, 1, 3)
    world.now += 66
    world.watches[1].check_deadline()
    said = f"rank 2 of 4 is behind: it finished {last} 66 s ago and has begun nothing since"
    for rank in range(4):
        assert f"all ranks still answer, but {said}" in world.message(rank)
    assert "the exchange of step 7, bucket 0 failed on rank 0 of 4" in world.message(0)
    assert f"the group failed on rank 2 of 4 after {last}" in world.message(2)


def test_a_rank_that_is_busy_inside_an_exchange_is_named() -> None:
    world = World(3)
    world.begin(0, 1, 2)
    world.now += 8
    world.ranks[1].progress.enter("computing")
    world.now += 58
    world.watches[0].check_deadline()
    said = "rank 1 of 3 is behind: it has been busy in the exchange of step 7, bucket 0 for 58 s"
    assert all(said in world.message(rank) for rank in range(3))


def test_ranks_that_wait_in_an_earlier_exchange_are_named() -> None:
    world = World(4)
    world.begin(0, 1, 2, 3)
    world.finish(2, 3)
    world.begin(2, 3, what="the exchange of step 8")
    world.now += 70
    world.watches[3].check_deadline()
    said = "ranks 0, 1 of 4 are behind: of rank 0, it has been waiting for others in the exchange"
    assert said in world.message(3)


def test_nobody_is_behind_by_a_moment() -> None:
    world = World(2)
    world.begin(0)
    world.now += 0.5
    world.watches[0].fail(world.ranks[0].failure(MemoryError("no room left")))
    assert "; all ranks still answer. Cause: no room left" in world.message(0)


def test_a_rank_that_does_not_answer_is_named_by_all_others() -> None:
    world = World(4)
    world.begin(0, 1, 2, 3)
    world.asleep = {1, 3}
    before = world.now
    world.watches[0].fail(world.ranks[0].failure(RuntimeError("Connection closed by peer")))
    assert PATIENCE <= world.now - before <= 2 * PATIENCE + 1  # rank 2 asks for itself
    for rank in (0, 2):
        assert "ranks 1, 3 of 4 did not answer: dead, stopped or out" in world.message(rank)
    assert "reported by rank 0: Connection closed by peer" in world.message(2)


def test_a_rank_that_has_not_come_is_named() -> None:
    board = Board()
    rank = Liveness(0, 3, 2.0)
    rank.arrive(board)
    Liveness(2, 3, 2.0).arrive(board)
    message = str(rank.failure(TimeoutError("Wait timeout after 2000ms, keys: /default_pg/0")))
    assert message.startswith("the first meeting failed on rank 0 of 3; rank 1 of 3 did not come.")
    assert "All ranks must attach, in the same order, within 2 seconds" in message
    assert "checkpoint" not in message


def test_a_frozen_store_is_told_from_one_that_is_gone() -> None:
    for fault, said in (
        (TimeoutError, "the store does not answer: the process that hosts it"),
        (RuntimeError, "the store is out of reach: the process that hosts it"),
        (KeyError, "the other ranks could not be asked"),
    ):
        world = World(2)
        world.begin(0)
        world.now += 70
        world.board.fault = fault
        world.watches[0].check_deadline()
        assert said in world.message(0)


def test_a_store_that_is_gone_matters_only_where_an_exchange_is_stuck() -> None:
    """A host that has finished its training leaves while others end their last exchange."""
    world = World(2)
    world.board.fault = RuntimeError
    world.watches[0].check_reports()
    world.begin(0)
    world.watches[0].check_reports()
    world.now += LINGER
    world.watches[0].check_reports()
    assert not world.errors
    world.now += 0.1
    world.watches[0].check_reports()
    assert "reported by the watcher: the store is out of reach" in world.message(0)


@pytest.mark.parametrize("first", [1, 2])
def test_a_rank_that_breaks_off_by_itself_is_named(first: int) -> None:
    """Even if another rank was the first to notice that its connection is closed."""
    world = World(3)
    world.begin(0, 1, 2)
    world.watches[1].interrupt()
    causes = {1: world.message(1), 2: "Connection closed by peer"}
    for rank in (first, 3 - first):
        world.ranks[rank].alarm(causes[rank])
        world.ranks[rank].answer()
    error = world.ranks[0].failure(RuntimeError("Connection closed by peer"))
    assert "; rank 1 of 3 was interrupted by Ctrl-C. Cause: Connection closed" in str(error)


def test_a_group_fails_once() -> None:
    world = World(2)
    world.begin(0, 1)
    world.watches[0].fail(ExchangeError("first"))
    world.watches[0].fail(ExchangeError("second"))
    world.watches[0].interrupt()
    assert world.message(0) == "first"
    asked = world.ranks[1].failure(RuntimeError("one"))
    notes = dict(world.board.notes)
    assert "Cause: two" in str(world.ranks[1].failure(RuntimeError("two")))
    assert "Cause: one" in str(asked)
    assert world.board.notes == notes  # nobody asks twice


def test_a_report_of_its_own_does_not_concern_a_rank() -> None:
    world = World(2)
    world.begin(0)
    world.ranks[0].alarm("my own")
    world.watches[0].check_reports()
    assert not world.errors


def test_who_waits_is_told_before_anything_else() -> None:
    """And exchanges are given up even if that goes wrong."""
    world = World(2)
    world.begin(0)
    seen = []

    def on_failure(error: SparsewireError) -> None:
        seen.append(world.ranks[0].given_up)
        raise ValueError("a mistake")

    watch = Watch(world.ranks[0], on_failure)
    with pytest.raises(ValueError, match="a mistake"):
        watch.fail(ExchangeError("first"))
    assert seen == [False]
    assert world.ranks[0].given_up


def test_ctrl_c_breaks_what_is_under_way() -> None:
    world = World(2)
    world.watches[0].interrupt()
    assert not world.errors
    world.begin(0)
    world.watches[0].interrupt()
    assert world.message(0) == "the exchange of step 7, bucket 0 was interrupted by Ctrl-C"


@pytest.mark.parametrize(
    "text", ["1", "{}", "[1, 2]", "\xff", json.dumps([1, "asleep", "x", 2, ""])]
)
def test_an_unreadable_answer_is_an_answer(text: str) -> None:
    world = World(2)
    world.begin(0, 1)
    world.board.set("here/1", text)
    error = world.ranks[0].failure(RuntimeError("closed"))
    assert "; all ranks still answer. Cause: closed" in str(error)


def test_a_call_that_never_returns_is_left_behind() -> None:
    never, within = threading.Event(), Environment().within
    assert within(60, lambda: 5) == 5
    with pytest.raises(KeyError):
        within(60, lambda: {}["missing"])
    with pytest.raises(TimeoutError):
        within(0.01, never.wait)
    never.set()


def test_a_store_that_blocks_for_ever_delays_the_failure_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With real threads: nobody who may be waited for is inside the store."""
    never = threading.Event()
    board = Board()
    monkeypatch.setattr(liveness, "LIMIT", 0.05)
    rank = Liveness(0, 2, 60.0)
    rank.arrive(board)
    monkeypatch.setattr(board, "_touch", never.wait)
    told: list[SparsewireError] = []
    watch = Watch(rank, told.append)
    watch.fail(rank.failure(TimeoutError("nothing moved for 65 seconds")))
    assert "the store does not answer" in str(told[0])
    never.set()


def test_a_process_without_threads_left_still_hears_of_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    rank = Liveness(0, 2, 60.0)
    rank.arrive(Board())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert "could not be asked: can't start new thread" in str(rank.failure(OSError("closed")))


def test_limits_fit_together() -> None:
    """Ranks answer well before those who ask lose patience, and those before they are cut off."""
    assert 2 * thread.POLL < PATIENCE < LIMIT
