"""Selectors whose ranks talk before they choose: all choose alike, and damage is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.exchange import Call, NonFinite
from sparsewire.message import add_checksum
from sparsewire.requests import Request
from sparsewire.segments import Segments
from sparsewire.selectors import Selector
from sparsewire.state import RESIDUAL

from ..laws.cases import CPU, Crew, label, noise, within

SHAPES = {"a": (10, 13), "bias": (9,), "b": (6, 32), "c": (7, 11)}
WHOLE = 10
SCOPES = ("layer", "global", 40)


def brute_blocks(totals: list[Tensor], segments: Segments, selector: sw.TopBlock) -> list[int]:
    """The chosen coordinates, counted out segment by segment and block by block."""
    chosen = []
    for segment in segments.sparse:
        blocks = [
            range(low, min(low + selector.block, segment.stop))
            for low in range(segment.start, segment.stop, selector.block)
        ]
        norms = [sum(float((t[list(b)].double() ** 2).sum()) for t in totals) for b in blocks]
        by_norm = sorted(range(len(blocks)), key=lambda n: (-norms[n], n))
        number = -(-segment.count // selector.block)
        chosen += [place for n in by_norm[:number] for place in blocks[n]]
    return sorted(chosen)


def brute_leader(totals: list[Tensor], segments: Segments, leader: int) -> list[int]:
    """The chosen coordinates, sorted segment by segment."""
    chosen = []
    for segment in segments.sparse:
        sizes = totals[leader][segment.start : segment.stop].abs().tolist()
        by_size = sorted(range(segment.length), key=lambda n: (-sizes[n], n))
        chosen += [segment.start + n for n in by_size[: segment.count]]
    return sorted(chosen)


def brute_union(totals: list[Tensor], segments: Segments, step: int) -> list[int]:
    """What any rank names, rank by rank and segment by segment, as many in turn as are sent."""
    world_size, chosen = len(totals), set[int]()
    for segment in segments.sparse:
        for turn in range(world_size):
            share = segment.count // world_size + (turn < segment.count % world_size)
            sizes = totals[(step + turn) % world_size][segment.start : segment.stop].abs().tolist()
            by_size = sorted(range(segment.length), key=lambda n: (-sizes[n], n))
            chosen |= {segment.start + n for n in by_size[:share]}
    return sorted(chosen)


def places(segments: Segments) -> Tensor:
    """Coordinates that are selected from."""
    return torch.cat([torch.arange(p.start, p.stop) for p in segments.sparse])


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    "selector",
    [
        sw.TopBlock(0.1, block=8),
        sw.TopBlock(0.3, block=7),
        sw.TopBlock(count=20, block=5),
        sw.LeaderTopK(0.1),
        sw.UnionTopK(0.1),
        sw.UnionTopK(count=3),
    ],
    ids=label,
)
@pytest.mark.parametrize("collective", [sw.AllReduce(), sw.AllGather()], ids=label)
def test_choice_is_the_one_that_brute_force_finds(
    selector: Selector, scope: Any, world_size: int, collective: sw.AllReduce
) -> None:
    """The memory is emptied where all send, on every rank, and the mean is that of all of it."""
    scheme = sw.Scheme(selector, scope=scope, dense_below=WHOLE, collective=collective)
    crew = Crew(scheme, world_size, SHAPES)
    segments = crew.segments
    inside = places(segments)
    for step in range(5):
        gradients = noise(world_size, crew.size, step)
        totals = [crew.remembered(r).float() + g for r, g in enumerate(gradients)]
        if isinstance(selector, sw.TopBlock):
            expected = brute_blocks(totals, segments, selector)
        elif isinstance(selector, sw.UnionTopK):
            expected = brute_union(totals, segments, step)
        else:
            expected = brute_leader(totals, segments, step % world_size)
        means = crew.exchange(gradients)
        sent = torch.zeros(crew.size, dtype=torch.bool)
        sent[expected] = True
        assert 0 < len(expected) < len(inside)
        for rank, total in enumerate(totals):
            kept = crew.remembered(rank)[inside].float()
            assert torch.equal(kept, torch.where(sent, 0.0, total)[inside])
        plain = torch.stack(totals).double().mean(dim=0)
        assert within(means[0][expected], plain[expected], 1e-4)
        assert not means[0][inside][~sent[inside]].any()


@pytest.mark.parametrize("world_size", [1, 3])
def test_equal_blocks_are_taken_from_the_left(world_size: int) -> None:
    crew = Crew(
        sw.Scheme(sw.TopBlock(count=8, block=4), dense_below=0, dense_1d=False),
        world_size,
        {"x": (30,)},
    )
    signs = torch.tensor([1.0, -1.0]).repeat(15)
    for start in (0, 8, 16):
        fresh = float(crew.step == 0)  # then nothing new
        mean = crew.exchange([fresh * signs] * world_size)[0]
        assert mean.nonzero().view(-1).tolist() == list(range(start, start + 8))


def test_the_shorter_last_block_can_be_chosen() -> None:
    """Its free slots are nowhere: they carry nothing, and nothing is counted for them."""
    for values in (sw.Float32(), sw.TwoBit()):
        scheme = sw.Scheme(
            sw.TopBlock(count=8, block=4), values=values, dense_below=0, dense_1d=False
        )
        crew = Crew(scheme, 2, {"x": (10,), "y": (3, 4)})
        gradient = torch.arange(1.0, 23.0)
        gradient[8:10] = 100.0
        mean = crew.exchange([gradient, gradient])[0]
        chosen = [*range(4, 10), *range(14, 22)]
        assert mean.nonzero().view(-1).tolist() == chosen
        assert int(crew.all_counters[0].selected) == len(chosen)
        assert crew.all_counters[0].aimed_at == 16
        if values == sw.Float32():
            assert torch.equal(mean[chosen], gradient[chosen])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_leads_in_its_turn(world_size: int) -> None:
    scheme = sw.Scheme(sw.LeaderTopK(count=1), memory=sw.NoMemory(), dense_below=0, dense_1d=False)
    crew = Crew(scheme, world_size, {"x": (10,)})
    for step in range(2 * world_size):
        gradients = [torch.full((10,), 0.5) for _ in range(world_size)]
        for rank, gradient in enumerate(gradients):
            gradient[rank + 3] = -2.0
        mean = crew.exchange(gradients)[0]
        assert mean.nonzero().view(-1).tolist() == [3 + step % world_size]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_all_ranks_name_some_or_take_turns(world_size: int) -> None:
    """There are never more than are to be sent, and what two ranks name is sent once."""
    scheme = sw.Scheme(sw.UnionTopK(count=2), memory=sw.NoMemory(), dense_below=0, dense_1d=False)
    crew = Crew(scheme, world_size, {"x": (10,)})
    for step in range(2 * world_size):
        gradients = [torch.full((10,), 0.5) for _ in range(world_size)]
        for rank, gradient in enumerate(gradients):
            gradient[rank + 1] = -2.0
        mean = crew.exchange(gradients)[0]
        expected = {1 + step % world_size, 1 + (step + 1) % world_size} | (
            {0} if world_size == 1 else set()
        )
        assert set(mean.nonzero().view(-1).tolist()) == expected
        assert int(crew.all_counters[0].selected) == (step + 1) * 2
    mean = crew.exchange([torch.arange(10.0)] * world_size)[0]  # all ranks name the same one
    assert mean.nonzero().view(-1).tolist() == ([8, 9] if world_size == 1 else [9])
    assert int(crew.all_counters[0].selected) == 4 * world_size + (2 if world_size == 1 else 1)


@pytest.mark.parametrize("world_size", [2, 4, 7])
def test_every_rank_keeps_no_more_than_its_own_share_promises(world_size: int) -> None:
    scheme = sw.Scheme(sw.UnionTopK(0.1), dense_below=0, dense_1d=False)
    crew = Crew(scheme, world_size, {"x": (333,)})
    gradients = noise(world_size, 333, 0)
    crew.exchange(gradients)
    delta = (34 // world_size) / 333
    for rank, gradient in enumerate(gradients):
        given = float(gradient.double().square().sum())
        assert float(crew.remembered(rank).square().sum()) <= (1 - delta) * given * (1 + 1e-6)


@pytest.mark.parametrize("world_size", [2, 4, 7])
def test_all_ranks_together_lose_no_more_than_blocks_promise(world_size: int) -> None:
    selector = sw.TopBlock(0.1, block=8)
    scheme = sw.Scheme(selector, dense_below=0, dense_1d=False)
    crew = Crew(scheme, world_size, {"x": (333,)})
    gradients = noise(world_size, 333, 0)
    crew.exchange(gradients)
    kept = sum(float(crew.remembered(rank).square().sum()) for rank in range(world_size))
    given = sum(float(gradient.double().square().sum()) for gradient in gradients)
    assert kept <= (1 - selector.contraction(333)) * given * (1 + 1e-6)


def test_blocks_beat_chance_and_top_k_beats_blocks() -> None:
    """What each of them leaves in memory after one step of heavy-tailed numbers."""
    left = {}
    for text in ("TopK(0.05)", "TopBlock(0.05, block=8)", "RandomK(0.05)"):
        crew = Crew(text, 1, {"x": (200, 100)})
        crew.exchange(noise(1, crew.size, 0))
        left[text] = float(crew.remembered(0).norm())
    assert sorted(left, key=lambda text: left[text]) == list(left)


def test_norms_that_are_not_finite_do_not_spoil_the_choice() -> None:
    """Numbers of 1e30 are fine, and their squares too large for any norm."""
    crew = Crew(
        sw.Scheme(sw.TopBlock(count=4, block=4), dense_below=0, dense_1d=False), 2, {"x": (20,)}
    )
    gradient = torch.ones(20)
    gradient[9] = 1e30
    mean = crew.exchange([gradient, gradient])[0]
    assert mean.nonzero().view(-1).tolist() == [8, 9, 10, 11]


NEGOTIATED = [
    "TopBlock(0.05, block=16)",
    "Scheme(TopBlock(0.05, block=16), values=TwoBit())",
    "LeaderTopK(0.05)",
    "Scheme(LeaderTopK(0.05), values=TwoBit(), indices=Int32())",
    "Scheme(LeaderTopK(0.05), indices=Bitmap(), collective=AllGather())",
    "UnionTopK(0.05)",
    "Scheme(UnionTopK(0.05), indices=Bitmap(), scope='global')",
    "Scheme(UnionTopK(0.05), values=TwoBit(), indices=Int32())",
]
PROPOSING = [text for text in NEGOTIATED if "Leader" in text or "Union" in text]
STEP, LEADER = 7, 1  # of three ranks


class Tapped(sw.groups.SimulatedGroup):
    """Three ranks, one of which gets one answer changed: the first one after the headers, with
    which the negotiation begins, if no other is named."""

    def __init__(
        self, victim: int = 0, change: Callable[[Any], Any] | None = None, at: int = 1
    ) -> None:
        super().__init__(3)
        self.requests: list[Sequence[Request]] = []
        self.answers: list[list[Any]] = []
        self._victim, self._change, self._at = victim, change, at

    def carry(self, ranks: Sequence[int], requests: Sequence[Request]) -> list[Any]:
        answers = super().carry(ranks, requests)
        if self._change is not None and len(self.answers) == self._at:
            answers[self._victim] = self._change(answers[self._victim])
        self.requests.append(requests)
        self.answers.append(answers)
        return answers


def take_one_step(
    scheme: str,
    group: Tapped,
    step: int = STEP,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[Crew, list[Tensor], list[NonFinite | sw.SparsewireError | None]]:
    """The ranks, what they hold after a step, and how it ended for each of them."""
    crew = Crew(scheme, 3, shapes or {"w": (40, 50), "b": (50,)}, group=group)
    crew.step = step
    flats = noise(3, crew.size, 0)
    return crew, flats, group.outcomes(crew.runs(flats), crew.all_counters)


@pytest.mark.parametrize("scheme", NEGOTIATED)
def test_undamaged_messages_pass(scheme: str) -> None:
    _, flats, outcomes = take_one_step(scheme, Tapped())
    assert outcomes == [None] * 3
    assert torch.equal(flats[0], flats[2])


def flipped(message: Tensor) -> Tensor:
    """With one bit changed."""
    damaged = message.clone()
    damaged[5] ^= 16
    return damaged


def of_leader(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Change the leader's message in an answer: it is the answer, or one of all ranks'."""

    def changed(answer: Any) -> Any:
        if isinstance(answer, Tensor):
            return change(answer)
        return [change(each) if rank == LEADER else each for rank, each in enumerate(answer)]

    return changed


@pytest.mark.parametrize("scheme", NEGOTIATED)
@pytest.mark.parametrize("victim", [0, 2])
def test_damage_at_one_rank_is_told_to_all(scheme: str, victim: int) -> None:
    crew, _, errors = take_one_step(scheme, Tapped(victim, of_leader(flipped)))
    for rank, error in enumerate(errors):
        assert isinstance(error, sw.errors.CorruptMessageError)
        assert f"message of rank {LEADER} that rank {victim} received" in str(error)
        assert "checksum" in str(error)
        assert not crew.remembered(rank).any()


@pytest.mark.parametrize("scheme", NEGOTIATED)
def test_a_message_of_any_bytes_does_no_harm(scheme: str) -> None:
    """Whatever the bytes say, coordinates stay in range and all ranks refuse the step."""
    chance = torch.Generator().manual_seed(0)
    for kind in ("noise", "zeros", "ones") * 10:

        def change(message: Tensor, kind: str = kind) -> Tensor:
            if kind == "noise":
                return torch.randint(256, message.shape, dtype=torch.uint8, generator=chance)
            return torch.full_like(message, 0 if kind == "zeros" else 255)

        crew, _, errors = take_one_step(scheme, Tapped(2, of_leader(change)))
        assert all(isinstance(error, sw.errors.CorruptMessageError) for error in errors)
        for rank, store in enumerate(crew.stores):
            assert not crew.remembered(rank).any()
            exchange = crew.next_exchange
            after = store.open(0, exchange.fields(rank), exchange.kept_as, CPU).after[RESIDUAL]
            assert after.any()
            assert after.isfinite().all()
            assert float(after[-1]) == 0


@pytest.mark.parametrize("scheme", PROPOSING)
@pytest.mark.parametrize("kind", ["step", "values"])
def test_a_message_of_another_kind_or_step_does_not_pass(scheme: str, kind: str) -> None:
    """The leader's own message is sealed as at another step, or as one of values would be."""
    group = Tapped()
    crew, _, _ = take_one_step(scheme, group, step=4 if kind == "step" else STEP)
    proposals = group.requests[1]
    assert proposals[0].op == ("broadcast" if "Leader" in scheme else "all_gather")
    proposal = proposals[LEADER].payload
    if kind == "values":
        context = crew.next_exchange.context(Call(STEP, LEADER))
        proposal = add_checksum(proposal.clone(), context.key(LEADER))

    def change(message: Tensor) -> Tensor:
        assert message.shape == proposal.shape
        return proposal

    _, _, errors = take_one_step(scheme, Tapped(0, of_leader(change)))
    assert all(isinstance(error, sw.errors.CorruptMessageError) for error in errors)


def test_norms_do_not_pass_for_values() -> None:
    """Both are added up in one step, here as many of one as of the other."""
    shapes, scheme = {"x": (192,)}, "Scheme(TopBlock(0.25, block=4), dense_below=0, dense_1d=False)"
    group = Tapped()
    assert take_one_step(scheme, group, shapes=shapes)[2] == [None] * 3
    norms, values = group.answers[1][0][LEADER], group.answers[3][0][LEADER]
    assert norms.shape == values.shape
    assert not torch.equal(norms, values)
    _, _, errors = take_one_step(scheme, Tapped(0, of_leader(lambda _: norms), at=3), shapes=shapes)
    assert all(isinstance(error, sw.errors.CorruptMessageError) for error in errors)


def test_whoever_proposes_too_much_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a rank that does not keep to its turn: all ranks leave out the last coordinates."""
    scheme = sw.Scheme(sw.UnionTopK(count=2), dense_below=0, dense_1d=False)
    crew = Crew(scheme, 5, {"x": (10,), "y": (11,)})
    monkeypatch.setattr(sw.UnionTopK, "_in_turn", staticmethod(lambda own, *_: own.indices))
    gradients = [torch.zeros(21) for _ in range(5)]
    for rank, gradient in enumerate(gradients):
        gradient[[rank, 10 + rank]] = 1.0
    means = crew.exchange(gradients)
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert means[0].nonzero().view(-1).tolist() == [0, 1, 2]  # and one too many to be told


@pytest.mark.parametrize(
    "text", ["TopBlock(0.05, block=16)", "LeaderTopK(0.05)", "UnionTopK(0.05)"]
)
def test_parameters_without_gradient_are_left_out(text: str) -> None:
    crew = Crew(
        sw.Scheme(sw.parse(text).at(0).selector, dense_below=WHOLE), 2, SHAPES, skips_unused=True
    )
    crew.exchange(noise(2, crew.size, 0))
    kept = [crew.remembered(rank) for rank in range(2)]
    param = crew.segments.params[0]
    gradients = noise(2, crew.size, 1)
    for gradient in gradients:
        gradient[param.start : param.stop] = 0
    mean = crew.exchange(gradients)[0]
    assert not mean[param.start : param.stop].any()
    for rank in range(2):
        now = crew.remembered(rank)
        assert torch.equal(now[param.start : param.stop], kept[rank][param.start : param.stop])


def test_nothing_is_said_where_nothing_is_chosen() -> None:
    for text in ("TopBlock(0.05)", "LeaderTopK(0.05)", "UnionTopK(0.05)"):
        talking, plain = (sw.explain(t, {"b": (100,)}, 4) for t in (text, "RandomK(0.05)"))
        assert talking.sent_bytes == plain.sent_bytes
        assert not talking.negotiation


def test_blocks_longer_than_any_memory() -> None:
    """Then every segment is one block and is sent densely."""
    gradients = [{"x": torch.randn(100, 100)} for _ in range(2)]
    states = [sw.functional.init(sw.TopBlock(0.01, block=2**40), gradients[0])] * 2
    mean, _ = sw.functional.simulate(gradients, states)
    torch.testing.assert_close(mean["x"], (gradients[0]["x"] + gradients[1]["x"]) / 2)
