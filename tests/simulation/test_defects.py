"""Defects that were mended, put back one by one: schedules find each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from sparsewire import exchange, intra_node, session
from sparsewire.adapters.audit import Audit
from sparsewire.adapters.pipeline import Pipeline
from sparsewire.adapters.rounds import Rounds
from sparsewire.errors import CorruptMessageError, DisagreementError, ExchangeError, SparsewireError
from sparsewire.groups import thread
from sparsewire.groups.connection import Connection
from sparsewire.groups.environment import Environment
from sparsewire.groups.liveness import Liveness
from sparsewire.groups.thread import POLL, ExchangeThread, Watch, Watcher
from sparsewire.intra_node import Machine
from sparsewire.message import FINE, Header
from sparsewire.requests import Routine
from sparsewire.session import Transaction
from sparsewire.sums import Total

from . import network
from .scenarios import play
from .schedule import KINDS, undisturbed
from .world import Violation

SEEDS = 400  # at most; nearly all are found by the first fifty
Patch = pytest.MonkeyPatch


# -- 1: a hang while the host of the store is frozen or cut off ------------------------------------


def a_call_to_the_store_has_no_limit(patch: Patch) -> None:
    patch.setattr(Environment, "within", lambda self, seconds, call: call())


def the_clock_looks_into_the_store(patch: Patch) -> None:
    def look(thread: Watcher) -> None:
        while thread.broken is None and not thread._stop.wait(POLL):
            thread.watch.check_reports()
            thread.watch.check_deadline()

    patch.setattr(Watcher, "_look_at_clock", look)
    only_the_clock_knows_the_deadline(patch)


def promises_fail_after_the_store_was_asked(patch: Patch) -> None:
    plain = Watch.fail

    def fail(watch: Watch, error: SparsewireError, level: int = 0) -> None:
        with suppress(RuntimeError):
            watch._liveness.alarm(str(error))
        plain(watch, error)

    patch.setattr(Watch, "fail", fail)
    patch.setattr(Liveness, "_ask", lambda *_: "nobody was asked")


# -- 2: ranks that part after a step that was left out ---------------------------------------------


def a_dropped_step_is_remembered(patch: Patch) -> None:
    plain = Pipeline.take

    def take(pipeline: Pipeline, bucket: Any) -> Any:
        dropped = pipeline.dropped
        future = plain(pipeline, bucket)
        pipeline.dropped = dropped
        return future

    patch.setattr(Pipeline, "take", take)


# -- 3: inside machines ----------------------------------------------------------------------------


def a_machines_sum_is_not_checked(patch: Patch) -> None:
    plain = intra_node.sum_over_ranks

    def trusting(*arguments: Any, **options: Any) -> Routine[Total]:
        total = yield from plain(*arguments, **options)
        return Total(total.values, torch.tensor(FINE))

    patch.setattr(intra_node, "sum_over_ranks", trusting)


def a_machines_mean_is_not_checked(patch: Patch) -> None:
    patch.setattr(Machine, "_note", lambda *_: None)


def a_machines_steps_are_not_compared(patch: Patch) -> None:
    def compare(*_: object) -> Routine[int]:
        return 0
        yield

    patch.setattr(Machine, "compare", compare)


def a_leader_keeps_errors_to_itself(patch: Patch) -> None:
    plain = intra_node._write_note
    patch.setattr(intra_node, "_write_note", lambda _, key: plain(None, key))


def the_audit_goes_before_the_headers(patch: Patch) -> None:
    plain = Pipeline._begin

    def begin(pipeline: Pipeline, step: Any) -> Any:
        number = pipeline.session.steps
        if pipeline.audit.is_due(number):
            audit = pipeline.audit.compare(pipeline._parameters, number, pipeline.group.rank)
            pipeline._drive(audit)
        return plain(pipeline, step)

    patch.setattr(Pipeline, "_begin", begin)


def leaders_are_called_ranks(patch: Patch) -> None:
    plain = session.read_statuses
    patch.setattr(session, "read_statuses", lambda calls, statuses, *_: plain(calls, statuses))


# -- 4: what one rank alone finds corrupt ----------------------------------------------------------


def _raises_instead(call: Callable[..., Any], kind: type[Exception]) -> Callable[..., Any]:
    """Call, but raise another kind of error."""

    def changed(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except ExchangeError as error:
            raise (error if error.is_agreed else kind(str(error))) from error

    return changed


def one_rank_refuses_a_header_and_goes_on(patch: Patch) -> None:
    unpack = _raises_instead(Header.unpack, DisagreementError)
    patch.setattr(Header, "unpack", staticmethod(unpack))


def one_rank_refuses_a_status_and_goes_on(patch: Patch) -> None:
    check = _raises_instead(exchange.check_statuses, CorruptMessageError)
    patch.setattr(exchange, "check_statuses", check)


def no_error_breaks_the_group(patch: Patch) -> None:
    def forgive(thread: ExchangeThread, error: SparsewireError) -> None:
        thread.watch._on_failure(error)

    patch.setattr(ExchangeThread, "_fail", forgive)
    patch.setattr(Connection, "abandon", lambda *_: None)


def _trust(patch: Patch, module: Any) -> None:
    plain = module.gather_checked

    def trusting(*arguments: Any) -> Routine[Any]:
        rows, _ = yield from plain(*arguments)
        return rows, torch.tensor(FINE)

    patch.setattr(module, "gather_checked", trusting)


def what_is_unused_is_not_checked(patch: Patch) -> None:
    _trust(patch, exchange)


def samples_of_the_residual_are_not_checked(patch: Patch) -> None:
    _trust(patch, session)


def buffers_are_not_checked(patch: Patch) -> None:
    patch.setattr(session, "matches_checksum", lambda *_: torch.tensor(True))


# -- 5: a thread that is inside the backend when the process exits ---------------------------------


def a_wait_for_the_backend_has_no_end(patch: Patch) -> None:
    def wait(work: network.SimulatedWork, is_given_up: Callable[[], bool]) -> bool:
        work.wait()
        return True

    patch.setattr(network, "wait_in_slices", wait)


# -- 6: ranks that drift apart ---------------------------------------------------------------------


def weights_are_not_compared(patch: Patch) -> None:
    patch.setattr(Audit, "is_due", lambda *_: False)


# -- 7: errors that name nobody --------------------------------------------------------------------


def who_was_interrupted_tells_nobody(patch: Patch) -> None:
    def listen(thread: Watcher) -> None:
        while thread.broken is None and not thread._stop.wait(POLL):
            thread.watch.check_reports()
        if thread.broken is not None:
            with suppress(RuntimeError):
                thread._liveness.answer()

    patch.setattr(Watcher, "_listen", listen)
    patch.setattr(Liveness, "_broken_off", lambda *_: "")


def nobody_asks_who_is_missing(patch: Patch) -> None:
    patch.setattr(Liveness, "_findings", lambda *_: "something went wrong")


def a_failure_is_not_reported(patch: Patch) -> None:
    patch.setattr(Liveness, "alarm", lambda *_: None)


# -- more that was mended --------------------------------------------------------------------------


def an_update_that_was_not_sent_is_dropped(patch: Patch) -> None:
    patch.setattr(Transaction, "defer", Transaction.rollback)


def an_update_that_arrived_corrupt_is_kept(patch: Patch) -> None:
    plain = Transaction.defer

    def defer(transaction: Transaction) -> None:
        transaction._lost = None
        plain(transaction)

    patch.setattr(Transaction, "defer", defer)


def a_host_that_is_through_must_stay(patch: Patch) -> None:
    patch.setattr(thread, "LINGER", 0.0)


def a_late_round_in_a_broken_group_seems_to_end(patch: Patch) -> None:
    def end(rounds: Rounds) -> None:
        rounds.finish()
        rounds._updates.collect()
        rounds._updates.begin_early()
        rounds._start()

    patch.setattr(Rounds, "end", end)


def only_the_clock_knows_the_deadline(patch: Patch) -> None:
    def wait(connection: Connection, ticket: Any) -> Any:
        liveness = connection.liveness
        try:
            if ticket.work is not None:
                liveness.progress.enter("waiting")
                if not connection._transport.wait(ticket.work, lambda: liveness.given_up):
                    raise connection._given_up()
                liveness.progress.enter("computing")
            return ticket.answer()
        except ExchangeError:
            raise
        except RuntimeError as cause:
            raise connection.failure(cause) from cause

    patch.setattr(Connection, "wait", wait)


# rare ones with the kinds of faults that find them, to save time
DEFECTS: list[tuple[Any, ...]] = [
    (a_call_to_the_store_has_no_limit, "all-gather", "freeze"),
    (the_clock_looks_into_the_store, "updates", "freeze"),
    (promises_fail_after_the_store_was_asked, "all-gather"),
    (a_dropped_step_is_remembered, "skip"),
    (a_machines_sum_is_not_checked, "machines", "flip"),
    (a_machines_mean_is_not_checked, "machines-union", "flip"),
    (a_machines_steps_are_not_compared, "machines", "late"),
    (a_leader_keeps_errors_to_itself, "machines-sharded", "late"),
    (the_audit_goes_before_the_headers, "machines", "late"),
    (leaders_are_called_ranks, "machines"),
    (one_rank_refuses_a_header_and_goes_on, "all-gather"),
    (one_rank_refuses_a_header_and_goes_on, "updates"),
    (one_rank_refuses_a_header_and_goes_on, "machines", "flip"),
    (one_rank_refuses_a_status_and_goes_on, "sharded"),
    (one_rank_refuses_a_status_and_goes_on, "updates-3"),
    (no_error_breaks_the_group, "all-reduce"),
    (what_is_unused_is_not_checked, "unused", "flip"),
    (samples_of_the_residual_are_not_checked, "updates-ahead", "flip"),
    (buffers_are_not_checked, "updates", "flip"),
    (a_wait_for_the_backend_has_no_end, "leader"),
    (weights_are_not_compared, "union", "drift"),
    (weights_are_not_compared, "updates-delayed", "drift"),
    (who_was_interrupted_tells_nobody, "all-gather", "interrupt"),
    (nobody_asks_who_is_missing, "sharded"),
    (a_failure_is_not_reported, "machines", "interrupt"),
    (an_update_that_was_not_sent_is_dropped, "updates"),
    (an_update_that_arrived_corrupt_is_kept, "updates-machines", "flip"),
    (a_host_that_is_through_must_stay, "all-gather", "late"),
    (a_late_round_in_a_broken_group_seems_to_end, "updates-delayed"),
    (only_the_clock_knows_the_deadline, "leader", "raise"),
]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Runs that are not disturbed are remembered, and those of a defect must not be."""
    undisturbed.cache_clear()
    yield
    undisturbed.cache_clear()


@pytest.mark.parametrize("entry", DEFECTS, ids=lambda entry: f"{entry[0].__name__}-{entry[1]}")
def test_schedules_find(entry: tuple[Any, ...], monkeypatch: Patch) -> None:
    defect, name, *kinds = entry
    defect(monkeypatch)
    found = None
    for seed in range(SEEDS):
        try:
            play(name, seed, kinds or KINDS)
        except Violation as violation:
            found = str(violation)
            break
    assert found is not None, f"no schedule of {SEEDS} finds it"
    assert f"python -m tests.simulation {name} {seed}" in found
