"""All ranks end with the same bits, and sending everything gives the plain mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sparsewire as sw
from sparsewire.collectives import Collective
from sparsewire.selectors import Coordination, Selector, Sized
from sparsewire.sums import ordered_sum

from .cases import (
    EPS,
    EXAMPLES,
    SAMPLE,
    SCOPES,
    SHAPES,
    WHOLE,
    WORLDS,
    Crew,
    dense,
    examples,
    is_cast,
    label,
    noise,
    rolls_dice,
    within,
)

FULL_SELECTORS = [
    replace(EXAMPLES[kind][0], ratio=1.0) if issubclass(kind, Sized) else kind()
    for kind in sw.scheme.FAMILIES["selectors"]
]


def goes(selector: Selector, collective: Collective) -> bool:
    """Whether a collective carries what a selector chooses, in plain numbers."""
    if collective.fields:
        return selector.coordination is not Coordination.NEGOTIATED
    return selector.coordination.is_shared or not collective.adds


FULL = [
    sw.Scheme(selector, collective=collective, scope=scope, **dense(limit))
    for selector in FULL_SELECTORS
    for collective in examples("collectives")
    if goes(selector, collective)
    for scope, limit in zip(SCOPES, (None, WHOLE, 0), strict=True)
]


# neither the choice nor the rounding depends on the rank: its turn, chance, where a sample begins
SYMMETRIC = [
    scheme
    for scheme in SAMPLE
    if (scheme.selector.coordination.is_shared or not scheme.selector.coordination.is_seeded)
    and scheme.selector.proposers == "none"
    and getattr(scheme.selector, "sample", 1000) >= 1000
    and not rolls_dice(scheme.values)
    # an owner writes sums, which a codec may round one way or the other
    and not (scheme.collective.fields and not scheme.values.exact(torch.float32))
]


@pytest.mark.parametrize("scheme", SAMPLE, ids=label)
def test_all_ranks_hold_the_same_bits(scheme: sw.Scheme) -> None:
    crew = Crew(scheme, 3)
    for step in range(2):
        means = crew.exchange(noise(3, crew.size, step))
        assert means[0].any()
        assert all(torch.equal(mean, means[0]) for mean in means)


@pytest.mark.parametrize("scheme", SYMMETRIC, ids=label)
def test_order_of_ranks_only_moves_the_rounding(scheme: sw.Scheme) -> None:
    there, back = Crew(scheme, 3), Crew(scheme, 3)
    gradients = noise(3, there.size, 0)
    total = torch.stack(gradients).double().abs().sum(dim=0)
    if not is_cast(scheme.values):
        total += 3 * total.max()  # a quantized value may be as large as any other
    mean = there.exchange(gradients)[0]
    assert within(mean, back.exchange(gradients[::-1])[0], 4 * EPS * total)


@pytest.mark.parametrize("scheme", FULL, ids=label)
def test_sending_everything_gives_the_plain_mean(scheme: sw.Scheme) -> None:
    for world_size in WORLDS:
        crew = Crew(scheme, world_size)
        for step in range(2):
            gradients = noise(world_size, crew.size, step)
            mean = crew.exchange(gradients)[0]
            plain = ordered_sum(gradients, torch.float32) / world_size
            total = torch.stack(gradients).double().abs().sum(dim=0)
            assert within(mean, plain, 2 * EPS * total)
            if world_size in (1, 2, 4):  # dividing does not round, so neither may anything else
                assert torch.equal(mean, plain)
        assert not crew.owed().any()


@pytest.mark.parametrize("world_size", WORLDS)
def test_full_random_k_and_dense_are_the_same(world_size: int) -> None:
    dense, full = (
        Crew(text, world_size)
        for text in ("Dense()", "Scheme(RandomK(1.0), dense_below=0, dense_1d=False)")
    )
    gradients = noise(world_size, dense.size, 0)
    assert torch.equal(dense.exchange(gradients)[0], full.exchange(gradients)[0])


@pytest.mark.parametrize(
    "selector", [s for s in examples("selectors") if s.coordination.is_shared], ids=label
)
@pytest.mark.parametrize("world_size", WORLDS)
def test_collectives_agree_that_send_all_they_have(selector: sw.RandomK, world_size: int) -> None:
    crews = [
        Crew(sw.Scheme(selector, collective=collective, dense_below=WHOLE), world_size)
        for collective in examples("collectives")
        if goes(selector, collective) and getattr(collective, "pull_ratio", 1.0) == 1.0
    ]
    assert len(crews) == (2 if selector.coordination is Coordination.NEGOTIATED else 3)
    for step in range(3):
        gradients = noise(world_size, crews[0].size, step)
        first, *others = (crew.exchange(gradients)[0] for crew in crews)
        total = torch.stack(gradients).abs().sum(dim=0) * (step + 1)
        bound = 2 * EPS * (total + first.abs().double())
        assert all(within(other, first, bound) for other in others)


@pytest.mark.parametrize("scope", SCOPES)
def test_runs_can_be_repeated(scope: object) -> None:
    def run() -> torch.Tensor:
        scheme = sw.Scheme(sw.BlockRandomK(0.1), scope=scope, dense_below=WHOLE)  # type: ignore[arg-type]
        crew = Crew(scheme, 3, SHAPES)
        return torch.stack([crew.exchange(noise(3, crew.size, s))[0] for s in range(4)])

    assert torch.equal(run(), run())
