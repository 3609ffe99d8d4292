"""Messages that arrive other than they were sent: found out by all ranks, and nothing changes.

A longer run of the fuzz tests: SPARSEWIRE_FUZZ=10000000 python -m pytest tests/test_damage.py
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.collectives.sums import Total
from sparsewire.desk import Call, Desk
from sparsewire.engine import Exchange, Unsound, agree
from sparsewire.groups.simulated import results_of
from sparsewire.ledger import Ledger
from sparsewire.message import (
    DIGEST_BYTES,
    FINE,
    HEADER_BYTES,
    REASONS,
    VERDICT_BYTES,
    seal,
)
from sparsewire.meter import Meter
from sparsewire.requests import Routine, Start, Wait
from sparsewire.workspace import Workspace

CASES = int(os.environ.get("SPARSEWIRE_FUZZ", 120_000))
SHAPES = {"w": (40, 50), "b": (50,)}
SCHEMES = [
    "TopK(0.05)",
    "Scheme(Threshold(0.05), values=TwoBit())",
    "Scheme(TopK(0.4), values=BFloat16())",
    "Scheme(TopK(0.05), indices=Int32(), values=QSGD())",
    "Scheme(BlockRandomK(0.05), values=OneBit('column'))",
    "Scheme(TopK(0.05), values=KBit(5), scope=300)",
    "Scheme(TopK(0.05), indices=Int32(), values=TwoBit(), scope=300)",
]


def gradient(seed: int) -> Tensor:
    return torch.randn(2050, generator=torch.Generator().manual_seed(seed))


class Rank:
    """One rank's exchange, driven by hand."""

    def __init__(self, scheme: str, rank: int, world: int) -> None:
        chosen = sw.parse(scheme).at(0)
        self.exchange = Exchange(chosen, chosen.cut(SHAPES))
        self.ledger = Ledger(chosen.fields, SHAPES, rank, world)
        self.gradient = gradient(rank)
        segments = self.exchange.segments
        shard = self.exchange.shard(rank, world)
        device = torch.device("cpu")
        self.before, self.after = self.ledger.open(0, segments, torch.float32, device, shard)
        self.call = Call(7, rank, world, bucket=2)
        self.run = self._step()

    def _step(self) -> Routine[Unsound | None]:
        finding = yield from self.exchange.run(
            self.gradient, self.before, self.after, self.call, Meter(), Workspace()
        )
        return (yield from agree([finding], self.call.rank))

    def desk(self) -> Desk:
        kept = self.before, self.after
        return self.exchange.desk(self.gradient, *kept, self.call, Meter(), Workspace())


def reason(desk: Desk, message: Tensor, rank: int = 0) -> str:
    """What is wrong with a message; empty if nothing is."""
    findings = desk.open(message, rank)[2]
    return next((words for words, fine in zip(REASONS, findings, strict=True) if not fine), "")


def message_of(scheme: str) -> tuple[Desk, Tensor]:
    """A desk, and a message as rank 0 sends it."""
    rank = Rank(scheme, 0, 1)
    request = rank.run.send(None)
    request = rank.run.send([request.payload])
    assert request.op == "all_gather"
    return rank.desk(), request.payload


def flip(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def overwrite(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    data[at : at + 8] = chance.randbytes(len(data[at : at + 8]))


def truncate(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def extend(data: bytearray, chance: random.Random) -> None:
    data += chance.randbytes(chance.randrange(1, 64))


def reorder(data: bytearray, chance: random.Random) -> None:
    cut = chance.randrange(1, len(data))
    data[:] = data[cut:] + data[:cut]


def blank(data: bytearray, chance: random.Random) -> None:
    data[:] = bytes(len(data))


MUTATIONS: Sequence[Callable[[bytearray, random.Random], None]] = (
    flip,
    overwrite,
    truncate,
    extend,
    reorder,
    blank,
)


def mutants(message: Tensor, count: int, seed: str) -> Any:
    chance, original = random.Random(seed), bytes(message.tolist())
    for number in range(count):
        data = bytearray(original)
        MUTATIONS[number % len(MUTATIONS)](data, chance)
        if data != original:
            yield torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()


@pytest.mark.timeout(0 if CASES > 200_000 else 120)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_mutant_passes(scheme: str) -> None:
    desk, message = message_of(scheme)
    assert not reason(desk, message)
    for mutant in mutants(message, CASES // len(SCHEMES), scheme):
        assert reason(desk, mutant)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_message_of_another_rank_step_or_bucket_is_damaged(scheme: str) -> None:
    desk, message = message_of(scheme)
    assert "checksum" in reason(desk, message, 1)
    context = desk.context
    for change in ({"step": 8}, {"bucket": 3}, {"scheme": 1}, {"layout": 1}):
        desk.context = replace(context, **change)
        assert "checksum" in reason(desk, message)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_well_sealed_mutant_does_no_harm(scheme: str) -> None:
    """Whoever can write a checksum can send other values, but none that break anything."""
    desk, message = message_of(scheme)
    size = desk.form.segments.size
    refused = 0
    for mutant in mutants(message[:-DIGEST_BYTES], 600, scheme):
        if mutant.numel() % 8:
            continue
        forged = seal(torch.cat([mutant, torch.zeros(8).byte()]), desk.context.key(0))
        indices, values, findings = desk.open(forged, 0)
        if not all(findings):
            refused += 1
            continue
        real = indices[indices < size]
        assert (real[1:] > real[:-1]).all()
        assert indices.numel() == 0 or (indices[0] >= 0 and indices[-1] <= size)
        assert values.isfinite().all()
        assert values.numel() == desk.form.value_count
    assert refused > 0


def run_with(
    scheme: str, tamper: Callable[[int, Any], Any], world: int = 3
) -> tuple[list[Rank], list[BaseException | None]]:
    """Drive all ranks; `tamper(rank, answer)` may change the payload's answer at one rank."""
    ranks = [Rank(scheme, rank, world) for rank in range(world)]
    answers: list[Any] = [None] * world
    errors: list[BaseException | None] = [None] * world
    while True:
        steps = []
        for number, rank in enumerate(ranks):
            try:
                steps.append(rank.run.send(answers[number]))
            except (StopIteration, sw.SparsewireError) as end:
                errors[number] = None if isinstance(end, StopIteration) else end
        if not steps:
            return ranks, errors
        assert len(steps) == world, "some ranks went on where others stopped"
        answers = results_of(steps)
        if isinstance(steps[0], Start):
            continue
        if isinstance(steps[0], Wait) or not _is_header_or_verdict(steps[0].payload):
            answers = [tamper(number, answer) for number, answer in enumerate(answers)]


def _is_header_or_verdict(payload: Tensor) -> bool:
    return payload.numel() in (HEADER_BYTES, VERDICT_BYTES)


SHARDED = [
    "Scheme(TopK(0.05), collective=Sharded())",
    "Scheme(Threshold(0.05), indices=Bitmap(), values=TwoBit(), collective=Sharded())",
    "Scheme(RandomK(0.05), values=BFloat16(), collective=Sharded(1.0))",
]


@pytest.mark.parametrize(
    ("scheme", "leg"),
    [*((scheme, 0) for scheme in SCHEMES + SHARDED), *((scheme, 1) for scheme in SHARDED)],
)
def test_one_flipped_bit_at_one_rank_is_told_to_all(scheme: str, leg: int) -> None:
    seen = iter([leg == 0, leg == 1])  # as rank 2 meets the two ways of a sharded exchange

    def tamper(rank: int, messages: Any) -> Any:
        if rank != 2 or not next(seen):
            return messages
        damaged = messages[1].clone()
        damaged[11] ^= 4
        return [messages[0], damaged, messages[2]]

    ranks, errors = run_with(scheme, tamper)
    for rank, error in zip(ranks, errors, strict=True):
        assert isinstance(error, sw.DamageError)
        assert "message of rank 1 that rank 2 received at step 7, bucket 2" in str(error)
        assert "checksum" in str(error)
        assert not rank.before["residual"].any()


@pytest.mark.parametrize("scheme", ["RandomK(0.05)", "Dense()"])
@pytest.mark.parametrize("leg", [0, 1])
def test_a_damaged_share_at_one_rank_is_told_to_all(scheme: str, leg: int) -> None:
    """Of what is to be added up, and of the sums."""
    legs = itertools.count()

    def tamper(rank: int, shares: list[Tensor]) -> list[Tensor]:
        if rank != 1 or next(legs) != leg:
            return shares
        damaged = shares[2].clone()
        damaged[5] ^= 16
        return [shares[0], shares[1], damaged]

    ranks, errors = run_with(scheme, tamper)
    for rank, error in zip(ranks, errors, strict=True):
        assert isinstance(error, sw.DamageError)
        assert "message of rank 2 that rank 1 received at step 7, bucket 2" in str(error)
        assert not rank.before["residual"].any()


@pytest.mark.parametrize("scheme", SHARDED)
@pytest.mark.parametrize("leg", [0, 1])
def test_a_message_for_another_owner_or_from_another_is_damaged(scheme: str, leg: int) -> None:
    """Rank 2 is handed, as rank 1's, what rank 1 wrote to another owner, or what rank 0 wrote."""
    seen: list[Any] = []

    def tamper(rank: int, messages: Any) -> Any:
        seen.append(messages)
        if rank != 2 or (len(seen) > 3) != bool(leg):
            return messages
        wrong = messages[0] if leg else seen[0][1]
        return [messages[0], wrong, messages[2]]

    _, errors = run_with(scheme, tamper)
    for error in errors:
        assert isinstance(error, sw.DamageError)
        assert "message of rank 1 that rank 2 received" in str(error)


@pytest.mark.parametrize("scheme", SHARDED)
@pytest.mark.parametrize("leg", [0, 1])
def test_sharded_messages_of_any_bytes_do_no_harm(scheme: str, leg: int) -> None:
    """Bytes at random, in both ways: all ranks refuse the step, and no memory changes."""
    noise = torch.Generator().manual_seed(0)
    seen: list[int] = []

    def tamper(rank: int, messages: Any) -> Any:
        seen.append(rank)
        if rank != 0 or (len(seen) > 3) != bool(leg):
            return messages
        return [torch.randint(256, m.shape, dtype=m.dtype, generator=noise) for m in messages]

    for _ in range(30):
        seen.clear()
        ranks, errors = run_with(scheme, tamper)
        assert all(isinstance(error, sw.DamageError) for error in errors)
        assert not any(field.any() for rank in ranks for field in rank.before.values())


@pytest.mark.parametrize("scheme", SCHEMES + SHARDED)
def test_undamaged_messages_pass(scheme: str) -> None:
    ranks, errors = run_with(scheme, lambda _, answer: answer)
    assert errors == [None] * 3
    assert torch.equal(ranks[0].gradient, ranks[2].gradient)


@pytest.mark.parametrize("flags", [0, 0b11, 0b101])
def test_more_or_fewer_indices_than_room_are_refused(flags: int) -> None:
    """Also where there is room for one index, which tensors would stretch to any number."""
    scheme = sw.Scheme(sw.TopK(count=1), whole=None)
    exchange = Exchange(scheme, scheme.cut({"w": (10, 10)}))
    call = Call(7, 0, 1, bucket=2)
    after = {"residual": torch.zeros(101)}
    desk = exchange.desk(torch.zeros(100), {}, after, call, Meter(), Workspace())
    message = desk.write(torch.tensor([5]), torch.ones(1))
    assert message[6] == 1  # six bytes of low bits, then the flags
    message[6] = flags
    assert "indices" in reason(desk, seal(message, desk.context.key(0)))


def test_sums_that_are_not_finite_are_refused() -> None:
    desk = Rank("RandomK(0.05)", 1, 3).desk()
    fine = torch.tensor(FINE)
    desk.check(Total(torch.tensor([1.0, -2.0]), fine))
    assert int(desk.damage) == FINE
    desk.check(Total(torch.tensor([1.0, float("nan")]), fine))
    assert REASONS[int(desk.damage) % len(REASONS)] == "it holds values that are not finite"


def test_a_damaged_verdict_stops_the_rank_that_got_it() -> None:
    ranks = [Rank("TopK(0.05)", rank, 2) for rank in range(2)]
    answers: list[Any] = [None, None]
    for _ in range(3):
        requests = [rank.run.send(answer) for rank, answer in zip(ranks, answers, strict=True)]
        answers = results_of(requests)
    damaged = answers[0][1].clone()
    damaged[3] ^= 1
    with pytest.raises(sw.DamageError, match="the verdict of rank 1 at step 7, bucket 2"):
        ranks[0].run.send([answers[0][0], damaged])
    assert not ranks[0].before["residual"].any()
