"""Messages that arrive other than they were sent: found out by all ranks, and nothing changes.

A longer run of the fuzz tests: SPARSEWIRE_FUZZ=10000000 python -m pytest tests/test_damage.py
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.collectives import Gather, Reduce
from sparsewire.desk import Call, Desk
from sparsewire.engine import Exchange
from sparsewire.groups.simulated import answer_all
from sparsewire.ledger import Ledger
from sparsewire.message import HEADER_BYTES, VERDICT_BYTES, Damaged, seal
from sparsewire.meter import Meter

CASES = int(os.environ.get("SPARSEWIRE_FUZZ", 120_000))
SHAPES = {"w": (40, 50), "b": (50,)}
SCHEMES = [
    "TopK(0.05)",
    "Scheme(Threshold(0.05), values=TwoBit())",
    "Scheme(TopK(0.4), values=BFloat16())",
    "Scheme(TopK(0.05), indices=Int32(), values=QSGD())",
    "Scheme(BlockRandomK(0.05), values=OneBit('column'))",
    "Scheme(TopK(0.05), values=KBit(5), scope=300)",
]


def gradient(seed: int) -> Tensor:
    return torch.randn(2050, generator=torch.Generator().manual_seed(seed))


class Rank:
    """One rank's exchange, driven by hand."""

    def __init__(self, scheme: str, rank: int, world: int) -> None:
        chosen = sw.parse(scheme).at(0)
        self.exchange = Exchange(chosen, chosen.cut(SHAPES))
        self.ledger = Ledger(chosen.memory.fields, SHAPES)
        self.gradient = gradient(rank)
        segments = self.exchange.segments
        self.before, self.after = self.ledger.open(0, segments, torch.float32, torch.device("cpu"))
        self.call = Call(7, rank, world, bucket=2)
        self.run = self.exchange.run(self.gradient, self.before, self.after, self.call, Meter())

    def desk(self) -> Desk:
        return Desk(self.exchange, self.gradient, self.after["residual"], self.call, Meter())


def message_of(scheme: str) -> tuple[Desk, Tensor]:
    """A desk, and a message as rank 0 sends it."""
    rank = Rank(scheme, 0, 1)
    request = rank.run.send(None)
    request = rank.run.send([request.payload])
    assert isinstance(request, Gather)
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
    desk.open(message, 0)
    for mutant in mutants(message, CASES // len(SCHEMES), scheme):
        with pytest.raises(Damaged):
            desk.open(mutant, 0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_message_of_another_rank_step_or_bucket_is_damaged(scheme: str) -> None:
    desk, message = message_of(scheme)
    with pytest.raises(Damaged):
        desk.open(message, 1)
    for call in (Call(8, 0, 1, bucket=2), Call(7, 0, 1, bucket=3)):
        desk.call = call
        with pytest.raises(Damaged):
            desk.open(message, 0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_well_sealed_mutant_does_no_harm(scheme: str) -> None:
    """Whoever can write a checksum can send other values, but none that break anything."""
    desk, message = message_of(scheme)
    size = desk.exchange.segments.size
    refused = 0
    for mutant in mutants(message[:-4], 600, scheme):
        try:
            indices, values = desk.open(seal(mutant, 0, 7, 2), 0)
        except Damaged:
            refused += 1
            continue
        real = indices[indices < size]
        assert (real[1:] > real[:-1]).all()
        assert indices.numel() == 0 or (indices[0] >= 0 and indices[-1] <= size)
        assert values.isfinite().all()
        assert values.numel() == desk.exchange.value_count
    assert refused > 0


def run_with(
    scheme: str, tamper: Callable[[int, Any], Any], world: int = 3
) -> tuple[list[Rank], list[BaseException | None]]:
    """Drive all ranks; `tamper(rank, answer)` may change the payload's answer at one rank."""
    ranks = [Rank(scheme, rank, world) for rank in range(world)]
    answers: list[Any] = [None] * world
    errors: list[BaseException | None] = [None] * world
    while True:
        requests = []
        for number, rank in enumerate(ranks):
            try:
                requests.append(rank.run.send(answers[number]))
            except (StopIteration, sw.SparsewireError) as end:
                errors[number] = None if isinstance(end, StopIteration) else end
        if not requests:
            return ranks, errors
        assert len(requests) == world, "some ranks went on where others stopped"
        answers = answer_all(requests)
        if requests[0].payload.numel() not in (HEADER_BYTES, VERDICT_BYTES) or isinstance(
            requests[0], Reduce
        ):
            answers = [tamper(number, answer) for number, answer in enumerate(answers)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_flipped_bit_at_one_rank_is_told_to_all(scheme: str) -> None:
    def tamper(rank: int, messages: Any) -> Any:
        if rank != 2:
            return messages
        damaged = messages[1].clone()
        damaged[11] ^= 4
        return [messages[0], damaged, messages[2]]

    ranks, errors = run_with(scheme, tamper)
    for rank, error in zip(ranks, errors, strict=True):
        assert isinstance(error, sw.DamageError)
        assert "message of rank 1 that rank 2 received at step 7, bucket 2" in str(error)
        assert "checksum" in str(error)
        assert torch.equal(rank.gradient, gradient(rank.call.rank))
        assert not rank.before["residual"].any()


@pytest.mark.parametrize("scheme", ["RandomK(0.05)", "Dense()"])
def test_another_sum_at_one_rank_is_told_to_all(scheme: str) -> None:
    def tamper(rank: int, total: Tensor) -> Tensor:
        if rank != 1:
            return total
        other = total.clone()
        other[3] += 1e-3
        return other

    ranks, errors = run_with(scheme, tamper)
    for rank, error in zip(ranks, errors, strict=True):
        assert isinstance(error, sw.DamageError)
        assert "the sum that rank 1 received" in str(error)
        assert torch.equal(rank.gradient, gradient(rank.call.rank))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_undamaged_messages_pass(scheme: str) -> None:
    ranks, errors = run_with(scheme, lambda _, answer: answer)
    assert errors == [None] * 3
    assert torch.equal(ranks[0].gradient, ranks[2].gradient)


@pytest.mark.parametrize("flags", [0, 0b11, 0b101])
def test_more_or_fewer_indices_than_room_are_refused(flags: int) -> None:
    """Also where there is room for one index, which tensors would stretch to any number."""
    scheme = sw.Scheme(sw.TopK(count=1), whole=None)
    exchange = Exchange(scheme, scheme.cut({"w": (10, 10)}))
    desk = Desk(exchange, torch.zeros(100), torch.zeros(101), Call(7, 0, 1, bucket=2), Meter())
    message = desk.write(torch.tensor([5]), torch.ones(1))
    assert message[6] == 1  # six bytes of low bits, then the flags
    message[6] = flags
    with pytest.raises(Damaged, match="cannot be decoded"):
        desk.open(seal(message[:-4], 0, 7, 2), 0)
