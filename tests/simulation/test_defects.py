"""Defects that were mended, put back one by one: the schedules find each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sparsewire import exchange, intra_node, session
from sparsewire.errors import CorruptMessageError, DisagreementError, ExchangeError
from sparsewire.intra_node import Machine
from sparsewire.message import FINE, Header
from sparsewire.requests import Routine
from sparsewire.session import Transaction
from sparsewire.sums import Total

from .network import Violation
from .schedule import Schedule
from .teams import undisturbed
from .test_schedules import SCENARIOS

SEEDS = 200
Patch = pytest.MonkeyPatch


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
    patch.setattr(ExchangeError, "is_agreed", True)


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
    patch.setattr(intra_node, "_write_note", lambda _: plain(None))


def bytes_that_arrive_corrupt_inside_a_machine_are_a_bad_gradient(patch: Patch) -> None:
    plain = session._with_code
    patch.setattr(session, "_with_code", lambda f, code: _keep(f, plain(f, code)))


def _keep(before: Any, after: Any) -> Any:
    object.__setattr__(after, "non_finite", before.non_finite)
    return after


def an_update_that_was_not_sent_is_dropped(patch: Patch) -> None:
    patch.setattr(Transaction, "defer", Transaction.rollback)


def an_update_that_arrived_corrupt_is_kept(patch: Patch) -> None:
    plain = Transaction.defer

    def defer(transaction: Transaction) -> None:
        transaction._lost = None
        plain(transaction)

    patch.setattr(Transaction, "defer", defer)


DEFECTS: list[tuple[Callable[[Patch], None], str]] = [
    (one_rank_refuses_a_header_and_goes_on, "all-gather"),
    (one_rank_refuses_a_header_and_goes_on, "updates"),
    (one_rank_refuses_a_header_and_goes_on, "machines"),
    (one_rank_refuses_a_status_and_goes_on, "sharded"),
    (one_rank_refuses_a_status_and_goes_on, "updates-3"),
    (no_error_breaks_the_group, "all-reduce"),
    (what_is_unused_is_not_checked, "unused"),
    (samples_of_the_residual_are_not_checked, "updates-ahead"),
    (buffers_are_not_checked, "updates"),
    (a_machines_sum_is_not_checked, "machines"),
    (a_machines_mean_is_not_checked, "machines-union"),
    (a_machines_steps_are_not_compared, "machines"),
    (a_leader_keeps_errors_to_itself, "machines-sharded"),
    (bytes_that_arrive_corrupt_inside_a_machine_are_a_bad_gradient, "machines"),
    (an_update_that_was_not_sent_is_dropped, "updates"),
    (an_update_that_arrived_corrupt_is_kept, "updates-machines"),
]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Runs that are not disturbed are remembered, and those of a defect must not be."""
    undisturbed.cache_clear()
    yield
    undisturbed.cache_clear()


@pytest.mark.parametrize(
    ("defect", "name"), DEFECTS, ids=lambda part: getattr(part, "__name__", part)
)
def test_schedules_find(defect: Callable[[Patch], None], name: str, monkeypatch: Patch) -> None:
    defect(monkeypatch)
    found = None
    for seed in range(SEEDS):
        try:
            Schedule(SCENARIOS[name], seed).play()
        except Violation as violation:
            found = str(violation)
            break
    assert found is not None, f"no schedule of {SEEDS} finds it"
    assert f"seed {seed}" in found


def test_a_schedule_replays_as_it_was() -> None:
    stories = []
    for _ in range(2):
        schedule = Schedule(SCENARIOS["machines"], 7)
        schedule.play()
        stories.append(schedule.story)
    assert stories[0] == stories[1]
