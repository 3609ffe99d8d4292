"""Memories: what each adds to the residual, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.memory import Memory
from sparsewire.segments import Segments
from sparsewire.state import RESIDUAL, StepState

from .laws.cases import label

SEGMENTS = Segments.partition(
    {"a": (3,), "b": (2,)}, sw.TopK(count=1), dense_below=0, dense_1d=False
)
GRADIENT = torch.tensor([3.0, 0.0, 4.0, 0.6, 0.8])  # of norm 5 and 1


def fields(velocity: float = 0.0) -> dict[str, Tensor]:
    """Residual and velocity with their spare slot."""
    return {RESIDUAL: torch.zeros(6), "velocity": torch.full((6,), velocity)}


def added(memory: Memory, velocity: float = 0.0, world_size: int = 1) -> tuple[Tensor, Tensor]:
    """What a memory adds for `GRADIENT`, and its velocity after."""
    state = StepState(fields(velocity), fields())
    addend = memory.addend(GRADIENT.clone(), state, SEGMENTS, world_size).clone()
    return addend, state.after["velocity"][:5]


def clipped(gradient: Tensor) -> Tensor:
    """What is added of a gradient that is clipped to norm 1."""
    state = StepState(fields(), fields())
    return sw.MomentumCorrection(0.5, clip=1.0).addend(gradient, state, SEGMENTS, 1)


def test_fields() -> None:
    keys = [[field.key for field in memory().fields] for memory in sw.scheme.FAMILIES["memory"]]
    assert keys == [["residual"], ["residual", "velocity"], []]


def test_only_the_residual_follows_the_rate() -> None:
    follow = {field.key: field.follows_lr for field in sw.MomentumCorrection().fields}
    assert follow == {"residual": True, "velocity": False}


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


@pytest.mark.parametrize("world_size", [1, 4])
def test_clipping_is_by_tensor_and_shared_among_ranks(world_size: int) -> None:
    addend, _ = added(sw.MomentumCorrection(0.5, clip=2.0), world_size=world_size)
    bound = 2 / math.sqrt(world_size)
    assert torch.allclose(addend[:3], GRADIENT[:3] * (bound / 5))
    assert torch.equal(addend[3:], GRADIENT[3:])  # of norm 1: short enough


def test_clipping_leaves_the_gradient_and_zeros_alone() -> None:
    gradient = torch.tensor([3.0, 0.0, 4.0, 0.0, 0.0])
    kept = gradient.clone()
    addend = clipped(gradient)
    assert torch.equal(gradient, kept)
    assert addend[3:].tolist() == [0, 0]


def test_clipping_huge_gradients_keeps_their_direction() -> None:
    addend = clipped(torch.tensor([3e30, 0.0, 4e30, 0.0, 0.0]))
    assert addend[:3].tolist() == pytest.approx([0.6, 0, 0.8])


@pytest.mark.parametrize("masking", [True, False])
def test_masking_forgets_the_velocity_of_what_was_sent(masking: bool) -> None:
    state = StepState(fields(), fields(velocity=1.0))
    sw.MomentumCorrection(0.5, masking=masking).mask(state, torch.tensor([1, 4, 5]))
    expected = [1, 0, 1, 1, 0] if masking else [1] * 5
    assert state.after["velocity"][:5].tolist() == expected


def test_whole_tensors_get_plain_momentum() -> None:
    """As with a momentum optimizer: x − γ·(g + m·g + m²·g …)."""
    scheme = sw.Scheme(sw.TopK(0.01), memory=sw.MomentumCorrection(0.5))
    state = [sw.functional.init(scheme, {"bias": torch.zeros(3)})]
    means = []
    for _ in range(3):
        mean, state = sw.functional.simulate([{"bias": torch.ones(3)}], state)
        means.append(float(mean["bias"][0]))
    assert means == [1.0, 1.5, 1.75]


@pytest.mark.parametrize("momentum", [0.0, 1.0, -0.5, 1.5, math.nan])
def test_momentum_outside_its_range_is_refused(momentum: float) -> None:
    with pytest.raises(sw.errors.SchemeError, match=r"between 0 and 1.*ErrorFeedback\(\)"):
        sw.MomentumCorrection(momentum)


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan])
def test_clip_that_is_no_norm_is_refused(clip: float) -> None:
    with pytest.raises(sw.errors.SchemeError, match="a norm above 0, or None"):
        sw.MomentumCorrection(clip=clip)
