"""Selectors whose ranks talk before they choose: all choose alike, and damage is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.message import DIGEST_BYTES
from sparsewire.segments import Segments
from sparsewire.selectors import Selector

from .laws.cases import Crew, label, noise, within
from .test_damage import Rank, run_with

SHAPES = {"a": (10, 13), "bias": (9,), "b": (6, 32), "c": (7, 11)}
WHOLE = 10
SCOPES = ("layer", "global", 40)


def brute_blocks(totals: list[Tensor], segments: Segments, selector: sw.TopBlock) -> list[int]:
    """The chosen coordinates, counted out piece by piece and block by block."""
    chosen = []
    for piece in segments.pieces:
        blocks = [
            range(low, min(low + selector.block, piece.stop))
            for low in range(piece.start, piece.stop, selector.block)
        ]
        norms = [sum(float((t[list(b)].double() ** 2).sum()) for t in totals) for b in blocks]
        by_norm = sorted(range(len(blocks)), key=lambda n: (-norms[n], n))
        number = -(-piece.count // selector.block)
        chosen += [place for n in by_norm[:number] for place in blocks[n]]
    return sorted(chosen)


def brute_leader(totals: list[Tensor], segments: Segments, leader: int) -> list[int]:
    """The chosen coordinates, sorted piece by piece."""
    chosen = []
    for piece in segments.pieces:
        sizes = totals[leader][piece.start : piece.stop].abs().tolist()
        by_size = sorted(range(piece.length), key=lambda n: (-sizes[n], n))
        chosen += [piece.start + n for n in by_size[: piece.count]]
    return sorted(chosen)


def brute_union(totals: list[Tensor], segments: Segments, step: int) -> list[int]:
    """What any rank names, rank by rank and piece by piece, as many in turn as are sent."""
    world, chosen = len(totals), set[int]()
    for piece in segments.pieces:
        for turn in range(world):
            share = piece.count // world + (turn < piece.count % world)
            sizes = totals[(step + turn) % world][piece.start : piece.stop].abs().tolist()
            by_size = sorted(range(piece.length), key=lambda n: (-sizes[n], n))
            chosen |= {piece.start + n for n in by_size[:share]}
    return sorted(chosen)


def places(segments: Segments) -> Tensor:
    """Coordinates that are selected from."""
    return torch.cat([torch.arange(p.start, p.stop) for p in segments.pieces])


@pytest.mark.parametrize("world", [1, 2, 4])
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
    selector: Selector, scope: Any, world: int, collective: sw.AllReduce
) -> None:
    """The memory is emptied where all send, on every rank, and the mean is that of all of it."""
    scheme = sw.Scheme(selector, scope=scope, whole=WHOLE, collective=collective)
    crew = Crew(scheme, world, SHAPES)
    segments = crew.engine.segments
    inside = places(segments)
    for step in range(5):
        gradients = noise(world, crew.size, step)
        totals = [crew.remembered(r).float() + g for r, g in enumerate(gradients)]
        if isinstance(selector, sw.TopBlock):
            expected = brute_blocks(totals, segments, selector)
        elif isinstance(selector, sw.UnionTopK):
            expected = brute_union(totals, segments, step)
        else:
            expected = brute_leader(totals, segments, step % world)
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


@pytest.mark.parametrize("world", [1, 3])
def test_equal_blocks_are_taken_from_the_left(world: int) -> None:
    crew = Crew(sw.Scheme(sw.TopBlock(count=8, block=4), whole=None), world, {"x": (30,)})
    signs = torch.tensor([1.0, -1.0]).repeat(15)
    for start in (0, 8, 16):
        fresh = float(crew.step == 0)  # then nothing new
        mean = crew.exchange([fresh * signs] * world)[0]
        assert mean.nonzero().view(-1).tolist() == list(range(start, start + 8))


def test_the_shorter_last_block_can_be_chosen() -> None:
    """Its free slots are nowhere: they carry nothing, and nothing is counted for them."""
    for values in (sw.Float32(), sw.TwoBit()):
        scheme = sw.Scheme(sw.TopBlock(count=8, block=4), values=values, whole=None)
        crew = Crew(scheme, 2, {"x": (10,), "y": (3, 4)})
        gradient = torch.arange(1.0, 23.0)
        gradient[8:10] = 100.0
        mean = crew.exchange([gradient, gradient])[0]
        chosen = [*range(4, 10), *range(14, 22)]
        assert mean.nonzero().view(-1).tolist() == chosen
        assert int(crew.meters[0].selected) == len(chosen)
        assert crew.meters[0].aimed_at == 16
        if values == sw.Float32():
            assert torch.equal(mean[chosen], gradient[chosen])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_leads_in_its_turn(world: int) -> None:
    scheme = sw.Scheme(sw.LeaderTopK(count=1), memory=sw.NoMemory(), whole=None)
    crew = Crew(scheme, world, {"x": (10,)})
    for step in range(2 * world):
        gradients = [torch.full((10,), 0.5) for _ in range(world)]
        for rank, gradient in enumerate(gradients):
            gradient[rank + 3] = -2.0
        mean = crew.exchange(gradients)[0]
        assert mean.nonzero().view(-1).tolist() == [3 + step % world]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_all_ranks_name_some_or_take_turns(world: int) -> None:
    """There are never more than are to be sent, and what two ranks name is sent once."""
    scheme = sw.Scheme(sw.UnionTopK(count=2), memory=sw.NoMemory(), whole=None)
    crew = Crew(scheme, world, {"x": (10,)})
    for step in range(2 * world):
        gradients = [torch.full((10,), 0.5) for _ in range(world)]
        for rank, gradient in enumerate(gradients):
            gradient[rank + 1] = -2.0
        mean = crew.exchange(gradients)[0]
        expected = {1 + step % world, 1 + (step + 1) % world} | ({0} if world == 1 else set())
        assert set(mean.nonzero().view(-1).tolist()) == expected
        assert int(crew.meters[0].selected) == (step + 1) * 2
    mean = crew.exchange([torch.arange(10.0)] * world)[0]  # all ranks name the same one
    assert mean.nonzero().view(-1).tolist() == ([8, 9] if world == 1 else [9])
    assert int(crew.meters[0].selected) == 4 * world + (2 if world == 1 else 1)


@pytest.mark.parametrize("world", [2, 4, 7])
def test_every_rank_keeps_no_more_than_its_own_share_promises(world: int) -> None:
    scheme = sw.Scheme(sw.UnionTopK(0.1), whole=None)
    crew = Crew(scheme, world, {"x": (333,)})
    gradients = noise(world, 333, 0)
    crew.exchange(gradients)
    delta = (34 // world) / 333
    for rank, gradient in enumerate(gradients):
        given = float(gradient.double().square().sum())
        assert float(crew.remembered(rank).square().sum()) <= (1 - delta) * given * (1 + 1e-6)


@pytest.mark.parametrize("world", [2, 4, 7])
def test_all_ranks_together_lose_no_more_than_blocks_promise(world: int) -> None:
    selector = sw.TopBlock(0.1, block=8)
    scheme = sw.Scheme(selector, whole=None)
    crew = Crew(scheme, world, {"x": (333,)})
    gradients = noise(world, 333, 0)
    crew.exchange(gradients)
    kept = sum(float(crew.remembered(rank).square().sum()) for rank in range(world))
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
    crew = Crew(sw.Scheme(sw.TopBlock(count=4, block=4), whole=None), 2, {"x": (20,)})
    gradient = torch.ones(20)
    gradient[9] = 1e30
    mean = crew.exchange([gradient, gradient])[0]
    assert mean.nonzero().view(-1).tolist() == [8, 9, 10, 11]


TALKING = [
    "TopBlock(0.05, block=16)",
    "Scheme(TopBlock(0.05, block=16), values=TwoBit())",
    "LeaderTopK(0.05)",
    "Scheme(LeaderTopK(0.05), values=TwoBit(), indices=Int32())",
    "Scheme(LeaderTopK(0.05), indices=Bitmap(), collective=AllGather())",
    "UnionTopK(0.05)",
    "Scheme(UnionTopK(0.05), indices=Bitmap(), scope='global')",
    "Scheme(UnionTopK(0.05), values=TwoBit(), indices=Int32())",
]
NAMING = [text for text in TALKING if "Leader" in text or "Union" in text]
LEADER = 1  # of three ranks at step 7


def during_talk(harm: Callable[[Any], Any], victim: int) -> Callable[[int, Any], Any]:
    """Harm what one rank hears before the choice, and nothing else."""
    heard: list[int] = []

    def tamper(rank: int, answer: Any) -> Any:
        heard.append(rank)
        return harm(answer) if rank == victim and len(heard) <= 3 else answer

    return tamper


@pytest.mark.parametrize("scheme", TALKING)
def test_undamaged_talk_passes(scheme: str) -> None:
    ranks, errors = run_with(scheme, lambda _, answer: answer)
    assert errors == [None] * 3
    assert torch.equal(ranks[0].gradient, ranks[2].gradient)


def flipped(message: Tensor) -> Tensor:
    """With one bit changed."""
    damaged = message.clone()
    damaged[5] ^= 16
    return damaged


def changed(answer: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a rank hears, with rank 1's message changed: that of the leader, or one of all."""
    if isinstance(answer, Tensor):
        return change(answer)
    return [change(each) if rank == LEADER else each for rank, each in enumerate(answer)]


@pytest.mark.parametrize("scheme", TALKING)
@pytest.mark.parametrize("victim", [0, 2])
def test_damaged_talk_at_one_rank_is_told_to_all(scheme: str, victim: int) -> None:
    ranks, errors = run_with(scheme, during_talk(partial(changed, change=flipped), victim))
    for rank, error in zip(ranks, errors, strict=True):
        assert isinstance(error, sw.DamageError)
        assert f"message of rank {LEADER} that rank {victim} received" in str(error)
        assert "checksum" in str(error)
        assert not rank.before["residual"].any()


@pytest.mark.parametrize("scheme", TALKING)
def test_a_message_of_any_bytes_does_no_harm(scheme: str) -> None:
    """Whatever the bytes say, coordinates stay in range and all ranks refuse the step."""
    chance = torch.Generator().manual_seed(0)
    for kind in ("noise", "zeros", "ones") * 10:

        def harm(message: Tensor, kind: str = kind) -> Tensor:
            if kind == "noise":
                return torch.randint(256, message.shape, dtype=torch.uint8, generator=chance)
            return torch.full_like(message, 0 if kind == "zeros" else 255)

        ranks, errors = run_with(scheme, during_talk(partial(changed, change=harm), 2))
        assert all(isinstance(error, sw.DamageError) for error in errors)
        assert not any(rank.before["residual"].any() for rank in ranks)
        assert all(rank.after["residual"][:-1].isfinite().all() for rank in ranks)
        assert all(float(rank.after["residual"][-1]) == 0 for rank in ranks)


@pytest.mark.parametrize("scheme", NAMING)
def test_another_exchanges_message_does_not_pass_for_this_ones(scheme: str) -> None:
    """Not that of another step, and not one of values: talk has keys of its own."""
    earlier = sealed_talk(scheme, step=4)
    assert earlier.op == ("broadcast" if "Leader" in scheme else "all_gather")

    def harm(message: Tensor) -> Tensor:
        assert message.shape == earlier.payload.shape
        return earlier.payload

    _, errors = run_with(scheme, during_talk(partial(changed, change=harm), 0))
    assert all(isinstance(error, sw.DamageError) for error in errors)


def test_whoever_names_too_much_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a rank that speaks out of its turn: the last coordinates are left out, by all."""
    scheme = sw.Scheme(sw.UnionTopK(count=2), whole=None)
    crew = Crew(scheme, 5, {"x": (10,), "y": (11,)})
    monkeypatch.setattr(sw.UnionTopK, "_in_turn", staticmethod(lambda own, *_: own.indices))
    gradients = [torch.zeros(21) for _ in range(5)]
    for rank, gradient in enumerate(gradients):
        gradient[[rank, 10 + rank]] = 1.0
    means = crew.exchange(gradients)
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert means[0].nonzero().view(-1).tolist() == [0, 1, 2]  # and one too many to be told


def sealed_talk(scheme: str, step: int) -> Any:
    """What the leader says at a step, as all do or alone."""
    rank = Rank(scheme, step % 3, 3)
    object.__setattr__(rank.call, "step", step)
    rank.run.send(None)
    headers = [rank.exchange._header(type(rank.call)(step, r, 3, 2)).pack() for r in range(3)]
    return rank.run.send(headers)


def test_norms_do_not_pass_for_values() -> None:
    """Both are summed up in one step, and sealed by different keys."""
    ranks = [Rank("TopBlock(0.05, block=16)", rank, 3) for rank in range(3)]
    values = ranks[0].exchange.context(ranks[0].call)
    norms = replace(values, is_ahead=True)
    assert len({context.key(rank) for rank in range(3) for context in (values, norms)}) == 6
    seen: list[list[Tensor]] = []

    def tamper(rank: int, shares: list[Tensor]) -> list[Tensor]:
        seen.append(shares)
        if rank != 0 or len(seen) <= 6:  # two legs of three ranks for norms, then those for values
            return shares
        digest = seen[0][1][-DIGEST_BYTES:]
        return [shares[0], torch.cat([shares[1][:-DIGEST_BYTES], digest]), shares[2]]

    _, errors = run_with("TopBlock(0.05, block=16)", tamper)
    assert all(isinstance(error, sw.DamageError) for error in errors)


@pytest.mark.parametrize(
    "text", ["TopBlock(0.05, block=16)", "LeaderTopK(0.05)", "UnionTopK(0.05)"]
)
def test_parameters_without_gradient_are_left_out(text: str) -> None:
    crew = Crew(sw.Scheme(sw.parse(text).at(0).selector, whole=WHOLE), 2, SHAPES, skips_unused=True)
    crew.exchange(noise(2, crew.size, 0))
    kept = [crew.remembered(rank) for rank in range(2)]
    span = crew.engine.segments.spans[0]
    gradients = noise(2, crew.size, 1)
    for gradient in gradients:
        gradient[span.start : span.stop] = 0
    mean = crew.exchange(gradients)[0]
    assert not mean[span.start : span.stop].any()
    for rank in range(2):
        now = crew.remembered(rank)
        assert torch.equal(now[span.start : span.stop], kept[rank][span.start : span.stop])


def test_nothing_is_said_where_nothing_is_chosen() -> None:
    for text in ("TopBlock(0.05)", "LeaderTopK(0.05)", "UnionTopK(0.05)"):
        talking, plain = (sw.explain(t, {"b": (100,)}, 4) for t in (text, "RandomK(0.05)"))
        assert talking.sent_bytes == plain.sent_bytes
        assert not talking.talk


def test_blocks_longer_than_any_memory() -> None:
    """Then every piece is one block and travels whole."""
    gradients = [{"x": torch.randn(100, 100)} for _ in range(2)]
    states = [sw.init(sw.TopBlock(0.01, block=2**40), gradients[0])] * 2
    mean, _ = sw.simulate(gradients, states)
    torch.testing.assert_close(mean["x"], (gradients[0]["x"] + gradients[1]["x"]) / 2)
