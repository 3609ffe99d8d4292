"""Random choices: every coordinate equally likely, none twice, ranks and steps independent.

All draws come from a counter, so these tests see the same numbers on every run.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.scheme import Scheme
from sparsewire.selectors import Selector, Sized
from sparsewire.workspace import Workspace

from .cases import CPU, SAMPLE, Crew, alone, label, noise, random_key, random_selectors

PIECES, STEPS = 24, 150
SIZES = [(2, 1), (3, 1), (3, 2), (5, 2), (7, 3), (7, 6), (16, 5)]
SIGMAS = 4.5  # some thousand comparisons are made


def resized(selector: Selector, count: int) -> Selector:
    """The same selector, sending `count` of every segment."""
    assert isinstance(selector, Sized)
    return replace(selector, ratio=None, count=count, min_count=1)


@cache
def drawn(selector: Selector, length: int, rank: int = 0, seed: int = 0) -> Tensor:
    """What is chosen: a 0/1 tensor of steps × segments × coordinates."""
    segments, work = alone(selector, PIECES * length, scope=length), Workspace()
    chosen = torch.zeros(STEPS, PIECES * length)
    for step in range(STEPS):
        key = random_key(step, rank, seed)
        chosen[step, selector.coordinates(segments, key, CPU, work)] = 1
    return chosen.view(STEPS, PIECES, length)


def is_likely(hits: Tensor, trials: int, chance: float) -> bool:
    """Whether counts of independent trials agree with a chance."""
    spread = math.sqrt(trials * chance * (1 - chance))
    return bool(((hits - trials * chance).abs() <= SIGMAS * spread + 1e-9).all())


@pytest.mark.parametrize(("length", "count"), SIZES)
@pytest.mark.parametrize("selector", random_selectors(), ids=label)
def test_every_coordinate_is_equally_likely(selector: Selector, length: int, count: int) -> None:
    chosen = drawn(resized(selector, count), length)
    assert (chosen.sum(dim=2) == count).all()  # without replacement: always `count` different ones
    chance = count / length
    assert is_likely(chosen.sum(dim=0), STEPS, chance)  # of one segment over the steps
    # over all: the tail, which blocks without wrap-around never reach, stands out here
    assert is_likely(chosen.sum(dim=(0, 1)), STEPS * PIECES, chance)


@pytest.mark.parametrize(("length", "count"), SIZES)
@pytest.mark.parametrize("selector", random_selectors(), ids=label)
def test_scaled_choice_is_unbiased(selector: Selector, length: int, count: int) -> None:
    """E[n/k · C(x)] = x."""
    vector = torch.linspace(-1, 2, length).double()
    mean = drawn(resized(selector, count), length).double().mean(dim=(0, 1)) * vector
    bound = SIGMAS * vector.abs() * math.sqrt((length / count - 1) / (STEPS * PIECES))
    assert ((mean * length / count - vector).abs() <= bound + 1e-9).all()


@pytest.mark.parametrize(("length", "count"), [(3, 2), (5, 2), (7, 3), (8, 4)])
def test_random_k_chooses_every_pair_equally_often(length: int, count: int) -> None:
    chosen = drawn(sw.RandomK(count=count), length).view(-1, length)
    together = chosen.T @ chosen
    first, second = torch.combinations(torch.arange(length)).T
    pairs = together[first, second]
    chance = count * (count - 1) / (length * (length - 1))
    assert is_likely(pairs, len(chosen), chance)


@pytest.mark.parametrize(("length", "count"), [(3, 2), (5, 2), (7, 6)])
def test_block_starts_anywhere_and_wraps_around(length: int, count: int) -> None:
    chosen = drawn(sw.BlockRandomK(count=count), length).view(-1, length)
    seen = {tuple(row.nonzero().squeeze(1).tolist()) for row in chosen}
    blocks = {tuple(sorted((s + i) % length for i in range(count))) for s in range(length)}
    assert seen == blocks


@pytest.mark.parametrize("selector", random_selectors(), ids=label)
def test_ranks_share_their_choice_or_make_their_own(selector: Selector) -> None:
    first, second = (drawn(resized(selector, 3), 7, rank=rank) for rank in (0, 1))
    if selector.shared:
        assert torch.equal(first, second)
    else:
        both = (first * second).sum(dim=(0, 1))
        assert is_likely(both, STEPS * PIECES, (3 / 7) ** 2)


@pytest.mark.parametrize("selector", random_selectors(), ids=label)
def test_steps_pieces_and_seeds_choose_independently(selector: Selector) -> None:
    chosen = drawn(resized(selector, 3), 7)
    chance = (3 / 7) ** 2
    steps = (chosen[1:] * chosen[:-1]).sum(dim=(0, 1))
    assert is_likely(steps, (STEPS - 1) * PIECES, chance)
    segments = (chosen[:, 1:] * chosen[:, :-1]).sum(dim=(0, 1))
    assert is_likely(segments, STEPS * (PIECES - 1), chance)
    seeds = (chosen * drawn(resized(selector, 3), 7, seed=1)).sum(dim=(0, 1))
    assert is_likely(seeds, STEPS * PIECES, chance)


@pytest.mark.parametrize("selector", random_selectors(), ids=label)
def test_choice_can_be_repeated_and_follows_names_not_places(selector: Selector) -> None:
    """A layer draws the same wherever it lies: buckets may be cut anew."""
    few = sw.segments.Segments.partition({"b": (50,)}, selector, dense_below=0, dense_1d=False)
    more = sw.segments.Segments.partition(
        {"a": (30,), "b": (50,)}, selector, dense_below=0, dense_1d=False
    )
    work = Workspace()
    once = selector.coordinates(few, random_key(3), CPU, work)
    assert torch.equal(once, selector.coordinates(few, random_key(3), CPU, work))
    elsewhere = selector.coordinates(more, random_key(3), CPU, work)
    assert torch.equal(once, elsewhere[elsewhere >= 30] - 30)


@pytest.mark.parametrize("scheme", [s for s in SAMPLE if s.scope == "layer"], ids=label)
def test_random_state_is_left_alone(scheme: Scheme) -> None:
    crew = Crew(scheme)
    gradients = noise(2, crew.size, 0)
    states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    crew.exchange(gradients)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (str(np.random.get_state()), random.getstate()) == states[1:]


@pytest.mark.parametrize("selector", random_selectors(), ids=label)
def test_random_state_has_no_say(selector: Selector) -> None:
    segments = alone(selector, 100)
    state = torch.get_rng_state()
    try:
        chosen = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            chosen.append(selector.coordinates(segments, random_key(0), CPU, Workspace()))
    finally:
        torch.set_rng_state(state)
    assert torch.equal(*chosen)
