"""Memories: what each adds to the ledger, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.memory import LEDGER, Memory
from sparsewire.segments import Segments

from .laws.cases import examples, label

SEGMENTS = Segments.cut({"a": (3,), "b": (2,)}, sw.TopK(count=1), whole=None)
GRADIENT = torch.tensor([3.0, 0.0, 4.0, 0.6, 0.8])  # of norm 5 and 1


def fields(velocity: float = 0.0) -> dict[str, Tensor]:
    """Ledger and velocity with their spare slot."""
    return {LEDGER: torch.zeros(6), "velocity": torch.full((6,), velocity)}


def added(memory: Memory, velocity: float = 0.0, world: int = 1) -> tuple[Tensor, Tensor]:
    """What a memory adds for `GRADIENT`, and its velocity after."""
    after = fields()
    addend = memory.addend(GRADIENT.clone(), fields(velocity), after, SEGMENTS, world).clone()
    return addend, after["velocity"][:5]


def test_fields() -> None:
    assert sw.ErrorFeedback().fields == (LEDGER,)
    assert sw.MomentumCorrection().fields == (LEDGER, "velocity")
    assert sw.NoMemory().fields == ()


@pytest.mark.parametrize("memory", [sw.ErrorFeedback(), sw.NoMemory()], ids=label)
def test_gradient_itself_is_added(memory: Memory) -> None:
    addend, velocity = added(memory, velocity=0.0)
    assert torch.equal(addend, GRADIENT)
    assert not velocity.any()


def test_momentum() -> None:
    addend, velocity = added(sw.MomentumCorrection(0.5), velocity=2.0)
    assert torch.equal(velocity, 0.5 * 2 + GRADIENT)
    assert torch.equal(addend, velocity)


def test_nesterov() -> None:
    addend, velocity = added(sw.MomentumCorrection(0.5, nesterov=True), velocity=2.0)
    assert torch.equal(velocity, 0.5 * (2 + GRADIENT))
    assert torch.equal(addend, velocity + GRADIENT)


@pytest.mark.parametrize("world", [1, 4])
def test_clipping_is_by_tensor_and_shared_among_ranks(world: int) -> None:
    addend, _ = added(sw.MomentumCorrection(0.5, clip=2.0), world=world)
    bound = 2 / math.sqrt(world)
    assert torch.allclose(addend[:3], GRADIENT[:3] * (bound / 5))
    assert torch.equal(addend[3:], GRADIENT[3:])  # of norm 1: short enough


def test_clipping_leaves_the_gradient_and_zeros_alone() -> None:
    memory = sw.MomentumCorrection(0.5, clip=1.0)
    gradient = torch.tensor([3.0, 0.0, 4.0, 0.0, 0.0])
    kept = gradient.clone()
    addend = memory.addend(gradient, fields(), fields(), SEGMENTS, 1)
    assert torch.equal(gradient, kept)
    assert addend[3:].tolist() == [0, 0]


def test_clipping_huge_gradients_keeps_their_direction() -> None:
    gradient = torch.tensor([3e30, 0.0, 4e30, 0.0, 0.0])
    addend = sw.MomentumCorrection(0.5, clip=1.0).addend(gradient, fields(), fields(), SEGMENTS, 1)
    assert addend[:3].tolist() == pytest.approx([0.6, 0, 0.8])


@pytest.mark.parametrize("masking", [True, False])
def test_masking_forgets_the_velocity_of_what_was_sent(masking: bool) -> None:
    after = fields(velocity=1.0)
    sw.MomentumCorrection(0.5, masking=masking).settle(after, torch.tensor([1, 4, 5]))
    expected = [1, 0, 1, 1, 0] if masking else [1] * 5
    assert after["velocity"][:5].tolist() == expected


def test_whole_tensors_get_plain_momentum() -> None:
    """As with a momentum optimizer: x − γ·(g + m·g + m²·g …)."""
    scheme = sw.Scheme(sw.TopK(0.01), memory=sw.MomentumCorrection(0.5))
    state = [sw.init(scheme, {"bias": torch.zeros(3)})]
    means = []
    for _ in range(3):
        mean, state = sw.simulate([{"bias": torch.ones(3)}], state)
        means.append(float(mean["bias"][0]))
    assert means == [1.0, 1.5, 1.75]


@pytest.mark.parametrize("memory", examples("memory"), ids=label)
def test_ledger_is_the_residual_or_nothing(memory: Memory) -> None:
    before = {field: torch.full((6,), 7.0) for field in memory.fields}
    ledger = memory.ledger(before)
    assert (ledger is before[LEDGER]) if LEDGER in memory.fields else (ledger is None)


@pytest.mark.parametrize("momentum", [0.0, 1.0, -0.5, 1.5, math.nan])
def test_momentum_outside_its_range_is_refused(momentum: float) -> None:
    with pytest.raises(sw.SchemeError, match=r"between 0 and 1.*ErrorFeedback\(\)"):
        sw.MomentumCorrection(momentum)


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan])
def test_clip_that_is_no_norm_is_refused(clip: float) -> None:
    with pytest.raises(sw.SchemeError, match="a norm above 0, or None"):
        sw.MomentumCorrection(clip=clip)
