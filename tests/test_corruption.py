"""Messages that arrive other than they were sent: found out by all ranks, and nothing changes.

A longer run of the fuzz tests: SPARSEWIRE_FUZZ=10000000 python -m pytest tests/test_corruption.py
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.collectives import Transfer
from sparsewire.counters import Counters
from sparsewire.exchange import Call, Exchange, NonFinite
from sparsewire.layout import Entries
from sparsewire.message import CHECKSUM_BYTES, FINE, HEADER_BYTES, REASONS, Context, add_checksum
from sparsewire.randomness import RandomKey
from sparsewire.requests import GroupName, Request, Routine
from sparsewire.selectors import NO_STATE
from sparsewire.session import Session
from sparsewire.state import StateStore
from sparsewire.workspace import Workspace

from .laws.cases import CPU, Crew, noise

CASES = int(os.environ.get("SPARSEWIRE_FUZZ", 120_000))
SHAPES = {"w": (40, 50), "b": (50,)}
STEP, BUCKET = 7, 2
SCHEMES = [
    "TopK(0.05)",
    "Scheme(Threshold(0.05), values=TwoBit())",
    "Scheme(TopK(0.4), values=BFloat16())",
    "Scheme(TopK(0.05), indices=Int32(), values=QSGD())",
    "Scheme(BlockRandomK(0.05), values=OneBit('column'))",
    "Scheme(TopK(0.05), values=KBit(5), scope=300)",
    "Scheme(TopK(0.05), values=LloydMax(3), scope=300)",
    "Scheme(TopK(0.05), indices=Int32(), values=TwoBit(), scope=300)",
]


class Message:
    """A message as rank 0 sends it, and rank 1, which reads what became of it."""

    def __init__(self, scheme: str, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        chosen = sw.parse(scheme).at(0)
        segments = chosen.partition(shapes)
        sender = Exchange(chosen, segments, world_size=1)
        call = Call(STEP, rank=0, bucket=BUCKET)
        store = StateStore(chosen.fields, shapes)
        state = store.open(0, sender.fields(0), torch.float32, CPU)
        (gradient,) = noise(1, segments.size, 0)
        run = sender.run(gradient, state, call, Counters(), Workspace())
        self.bytes: Tensor = run.send([next(run).payload]).payload
        self.context = sender.context(call)
        self.key = self.context.key(0)
        self.layout = sender.layout
        self._plan = Exchange(chosen, segments, world_size=2).plan

    def read(
        self, *messages: Tensor, context: Context | None = None
    ) -> tuple[list[Entries], tuple[int, str] | None]:
        """The entries of the messages of ranks 0, 1, …, as the next rank reads them, and the
        first rank whose message is damaged and why."""
        rank = len(messages)
        transfer = Transfer(
            context or self.context,
            RandomKey(0, STEP, rank),
            rank + 1,
            torch.zeros(0),
            NO_STATE,
            [],
            Counters(),
            Workspace(),
            torch.tensor(FINE),
        )
        own = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        entries = self._plan.decode([*messages, self.bytes], own, transfer)
        corruption = int(transfer.corruption)
        if corruption == FINE:
            return entries[:-1], None
        sender, reason = divmod(corruption, len(REASONS))
        return entries[:-1], (sender, REASONS[reason])

    def corruption(
        self, *messages: Tensor, context: Context | None = None
    ) -> tuple[int, str] | None:
        """The first rank whose message is damaged, and why."""
        return self.read(*messages, context=context)[1]


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


def mutants(message: Tensor, count: int, seed: str) -> Iterator[Tensor]:
    chance, original = random.Random(seed), bytes(message.tolist())
    for number in range(count):
        data = bytearray(original)
        MUTATIONS[number % len(MUTATIONS)](data, chance)
        if data != original:
            yield torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()


@pytest.mark.timeout(0 if CASES > 200_000 else 120)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_mutant_passes(scheme: str) -> None:
    message = Message(scheme)
    assert message.corruption(message.bytes) is None
    for mutant in mutants(message.bytes, CASES // len(SCHEMES), scheme):
        assert message.corruption(mutant) is not None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_message_of_another_rank_step_or_bucket_is_damaged(scheme: str) -> None:
    message = Message(scheme)
    assert message.corruption(message.bytes, message.bytes) == (1, "its checksum does not match")
    for change in ({"step": 8}, {"bucket": 3}, {"scheme": 1}, {"layout": 1}):
        other = replace(message.context, **change)
        corruption = message.corruption(message.bytes, context=other)
        assert corruption == (0, "its checksum does not match")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_well_sealed_mutant_does_no_harm(scheme: str) -> None:
    """Whoever can write a checksum can send other values, but none that break anything."""
    message = Message(scheme)
    size = message.layout.segments.size
    refused = passed = 0
    for mutant in mutants(message.bytes[:-CHECKSUM_BYTES], 600, scheme):
        if mutant.numel() % 8:
            continue
        forged = add_checksum(torch.cat([mutant, torch.zeros(8).byte()]), message.key)
        ((indices, values),), corruption = message.read(forged)
        if corruption is not None:
            refused += 1
            continue
        passed += 1
        real = indices[indices < size]
        assert (real[1:] > real[:-1]).all()
        assert indices.numel() == 0 or (indices[0] >= 0 and indices[-1] <= size)
        assert values.isfinite().all()
        assert values.numel() == message.layout.value_count
    assert refused > 0
    assert passed > 0


@pytest.mark.parametrize("flags", [0, 0b11, 0b101])
def test_more_or_fewer_indices_than_room_are_refused(flags: int) -> None:
    """Also where there is room for one index, which tensors would stretch to any number."""
    message = Message("Scheme(TopK(count=1), dense_below=0, dense_1d=False)", {"w": (10, 10)})
    forged = message.bytes.clone()
    assert bin(int(forged[6])).count("1") == 1  # six bytes of low bits, then the flags
    forged[6] = flags
    corruption = message.corruption(add_checksum(forged, message.key))
    assert corruption == (0, "its indices are not ascending, unique and in range")


Damage = Callable[[list[list[Tensor]]], None]  # of what each rank gets from each other


class Damaging(sw.groups.SimulatedGroup):
    """Damages the answers to one round of requests, counted without headers."""

    def __init__(self, world_size: int, corruption: Damage, leg: int, group: GroupName) -> None:
        super().__init__(world_size)
        self._damage, self._leg, self._group = corruption, leg, group
        self.legs = 0

    def carry(self, ranks: Sequence[int], requests: Sequence[Request]) -> list[Any]:
        answers = [list(answer) for answer in super().carry(ranks, requests)]
        request = requests[0]
        if request.group == self._group and request.payload.numel() != HEADER_BYTES:
            if self.legs == self._leg:
                self._damage(answers)
            self.legs += 1
        return answers


class Ranks(Crew):
    """Ranks that hold something back already; damage meets them in the next step."""

    def __init__(self, scheme: str, world_size: int = 3) -> None:
        super().__init__(scheme, world_size, SHAPES)
        self.step = STEP - 1
        self.exchange(noise(world_size, self.size, self.step))

    def runs(self, flats: Sequence[Tensor]) -> list[Routine[NonFinite | None]]:
        sessions = zip(self.sessions, flats, strict=True)
        return [take_step(session, flat) for session, flat in sessions]

    def outcomes(
        self, corruption: Damage, leg: int = 0, group: GroupName = "exchange"
    ) -> list[NonFinite | sw.SparsewireError | None]:
        """How the step ends for every rank."""
        self.flats = noise(self.world_size, self.size, self.step)
        damaging = Damaging(self.world_size, corruption, leg, group)
        outcomes = damaging.outcomes(self.runs(self.flats), self.all_counters)
        assert damaging.legs > leg
        return outcomes

    def kept(self, rank: int) -> Tensor:
        """All that a rank keeps."""
        fields = self.stores[rank].state_dict().values()
        return torch.cat([tensor.flatten() for held in fields for tensor in held.values()])


def take_step(session: Session, flat: Tensor) -> Routine[NonFinite | None]:
    """One rank's step with a single exchange, which is not in bucket 0."""
    transaction = session.begin()
    unit = transaction.unit(0, SHAPES, flat.dtype, CPU, flat)
    yield from transaction.exchange(unit, BUCKET)
    status = yield from transaction.agree()
    transaction.commit()
    return status


SUMS = ["RandomK(0.05)", "Dense()"]
SHARDED = [
    "Scheme(TopK(0.05), collective=Sharded())",
    "Scheme(Threshold(0.05), indices=Bitmap(), values=TwoBit(), collective=Sharded())",
    "Scheme(RandomK(0.05), values=BFloat16(), collective=Sharded(1.0))",
]
LEGS = [
    *((scheme, 0) for scheme in SCHEMES + SUMS + SHARDED),
    *((scheme, 1) for scheme in SUMS + SHARDED),
]


@pytest.mark.parametrize(("scheme", "leg"), LEGS)
def test_undamaged_messages_pass(scheme: str, leg: int) -> None:
    ranks = Ranks(scheme)
    assert ranks.outcomes(lambda answers: None, leg) == [None] * 3
    assert [session.steps for session in ranks.sessions] == [STEP + 1] * 3
    assert torch.equal(ranks.flats[0], ranks.flats[2])


def refusal(ranks: Ranks, corruption: Damage, leg: int) -> str:
    """What all ranks say, who refuse the step; nothing that they keep changes."""
    kept = [ranks.kept(rank) for rank in range(3)]
    errors = ranks.outcomes(corruption, leg)
    assert all(isinstance(error, sw.errors.CorruptMessageError) for error in errors)
    assert all(torch.equal(ranks.kept(rank), kept[rank]) for rank in range(3))
    assert [session.steps for session in ranks.sessions] == [STEP] * 3
    (text,) = {str(error) for error in errors}
    return text


BROKEN_SEAL = (
    "the message of rank 1 that rank 2 received at step 7, bucket 2: its checksum does not match"
)


@pytest.mark.parametrize(("scheme", "leg"), LEGS)
def test_one_flipped_bit_at_one_rank_is_told_to_all(scheme: str, leg: int) -> None:
    def flip_bit(answers: list[list[Tensor]]) -> None:
        answers[2][1] = answers[2][1].clone()
        answers[2][1][11] ^= 4

    ranks, others = Ranks(scheme), Ranks(scheme)
    assert refusal(ranks, flip_bit, leg).startswith(BROKEN_SEAL)
    for step in range(2):  # and they go on as if nothing had happened
        gradients = noise(3, ranks.size, step)
        assert torch.equal(ranks.exchange(gradients)[0], others.exchange(gradients)[0])


@pytest.mark.parametrize("scheme", SHARDED)
@pytest.mark.parametrize("leg", [0, 1])
def test_a_message_for_another_owner_or_from_another_is_damaged(scheme: str, leg: int) -> None:
    """Rank 2 is handed, as rank 1's, what rank 1 wrote to another owner, or what rank 0 wrote."""

    def swap(answers: list[list[Tensor]]) -> None:
        answers[2][1] = answers[2][0] if leg else answers[0][1]

    assert refusal(Ranks(scheme), swap, leg).startswith(BROKEN_SEAL)


@pytest.mark.parametrize("scheme", SHARDED)
@pytest.mark.parametrize("leg", [0, 1])
def test_sharded_messages_of_any_bytes_do_no_harm(scheme: str, leg: int) -> None:
    """Bytes at random, both ways: all ranks refuse the step."""
    chance = torch.Generator().manual_seed(0)

    def scramble(answers: list[list[Tensor]]) -> None:
        answers[0] = [
            torch.randint(256, message.shape, dtype=torch.uint8, generator=chance)
            for message in answers[0]
        ]

    ranks = Ranks(scheme)
    for _ in range(30):
        assert "that rank 0 received at step 7" in refusal(ranks, scramble, leg)


def test_a_damaged_verdict_breaks_the_group() -> None:
    """The rank that got it cannot know what the others decided."""

    def flip_bit(answers: list[list[Tensor]]) -> None:
        answers[0][1] = answers[0][1].clone()
        answers[0][1][3] ^= 1

    ranks = Ranks("TopK(0.05)", 2)
    kept = ranks.kept(0)
    error, status = ranks.outcomes(flip_bit, group="status")
    assert type(error) is sw.errors.ExchangeError
    assert "the group is broken: restart all ranks" in str(error)
    assert "the status of rank 1 at step 7, bucket 2" in str(error)
    assert torch.equal(ranks.kept(0), kept)
    assert status is None  # nobody else knows
    assert [session.steps for session in ranks.sessions] == [STEP, STEP + 1]
