"""Simulated workers in flat tensors do what `simulate` does, bit for bit, and count the bytes."""

from __future__ import annotations

import pytest
import torch

import sparsewire as sw
from sparsewire.adapters.simulation import Simulation

SHAPES = {"a": (40, 50), "bias": (40,), "b": (64, 30)}
WORKERS = 3
CPU = torch.device("cpu")
SCHEMES = [
    "Dense()",
    "TopK(0.05)",
    "Scheme(TopK(0.05), scope='global', values=TwoBit())",
    "Scheme(Threshold(0.05), seed=3)",
    "RandomK(0.05)",
    "RandomK(0.05, shared=False)",
    "BlockRandomK(0.05)",
    "BlockRandomK(0.05, shared=True)",
    "TopBlock(0.05, block=16)",
    "Scheme(TopBlock(0.05, block=7), values=TwoBit(), scope='global')",
    "Scheme(TopBlock(0.05, block=16), memory=MomentumCorrection(0.9))",
    "LeaderTopK(0.05)",
    "UnionTopK(0.05)",
    "Scheme(UnionTopK(0.05), values=TwoBit(), scope=100)",
    "Scheme(LeaderTopK(0.05), values=TwoBit(), memory=ErrorFeedback(dtype='bfloat16'))",
    "Warmup(LeaderTopK(0.05), steps=4, ease=True)",
    "Warmup(TopBlock(0.05, block=16), steps=3)",
    "Scheme(TopK(0.05), memory=MomentumCorrection(0.9))",
    "Scheme(TopK(0.05), memory=ErrorFeedback(dtype='bfloat16'))",
    "Scheme(RandomK(0.05), memory=NoMemory())",
    "Scheme(TopK(0.05), collective=Sharded())",
    "Scheme(Threshold(0.05), values=TwoBit(), collective=Sharded(0.1))",
    "Scheme(BlockRandomK(0.05), collective=Sharded(1.0))",
    "Scheme(TopK(0.05), memory=NoMemory(), collective=Sharded())",
    "Warmup(Scheme(TopK(0.05), collective=Sharded()), steps=3)",
    "Warmup(RandomK(0.05), steps=3)",
    "Warmup(TopK(0.02, min_count=8), steps=3, ratio=0.1)",
    "Warmup(TopK(0.05), steps=4, ease=True)",
]


def gradients(step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        for _ in range(WORKERS)
    ]


def fill(simulation: Simulation, given: list[dict[str, torch.Tensor]]) -> None:
    for flat, gradient in zip(simulation.gradients, given, strict=True):
        for param, view in simulation.segments.views(flat):
            view.copy_(gradient[param.name].flatten())


@pytest.mark.parametrize("text", SCHEMES)
def test_the_same_as_simulate(text: str) -> None:
    scheme = sw.parse(text)
    simulation = Simulation(scheme, SHAPES, WORKERS, CPU)
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    states = [sw.functional.init(scheme, zeros) for _ in range(WORKERS)]
    for step in range(7):
        given = gradients(step)
        fill(simulation, given)
        simulation.exchange()
        mean, states = sw.functional.simulate(given, states)
        for param, view in simulation.segments.views(simulation.gradients[0]):
            assert torch.equal(view.view(param.shape), mean[param.name]), (step, param.name)
    assert simulation.flaw is None
    assert not simulation.is_captured


@pytest.mark.parametrize(
    "text",
    [
        "Dense()",
        "TopK(0.05)",
        "RandomK(0.05, shared=False)",
        "TopBlock(0.05)",
        "LeaderTopK(0.05)",
        "UnionTopK(0.05)",
    ],
)
def test_bytes_are_those_that_are_explained(text: str) -> None:
    simulation = Simulation(sw.parse(text), SHAPES, WORKERS, CPU)
    for step in range(3):
        fill(simulation, gradients(step))
        simulation.exchange()
    assert simulation.sent == simulation.received == sw.explain(text, SHAPES, WORKERS).sent_bytes


def test_bytes_of_a_warmup_are_a_mean_over_steps() -> None:
    warmup = sw.parse("Warmup(TopK(0.02), steps=3, ratio=0.1)")
    simulation = Simulation(warmup, SHAPES, WORKERS, CPU)
    for step in range(9):
        fill(simulation, gradients(step))
        simulation.exchange()
    first, later = (
        sw.explain(f"TopK({ratio})", SHAPES, WORKERS).sent_bytes for ratio in (0.1, 0.02)
    )
    assert simulation.sent == pytest.approx((3 * first + 6 * later) / 9)


@pytest.mark.parametrize(("workers", "turns"), [(1, 4), (3, 12), (8, 8)])
def test_there_are_as_many_exchanges_to_capture_as_all_leaders_need(
    workers: int, turns: int
) -> None:
    """What is captured repeats its step: with fewer, some ranks would never lead on a GPU."""
    cases = (("LeaderTopK(0.05)", turns), ("UnionTopK(0.05)", turns), ("TopBlock(0.05)", 4))
    for text, expected in cases:
        simulation = Simulation(sw.parse(text), SHAPES, workers, CPU)
        simulation.exchange()
        assert len(simulation._phases[-1]._turns) == expected


@pytest.mark.parametrize(
    "scheme",
    [
        "TopK(0.05)",
        "RandomK(0.05)",
        "Scheme(RandomK(0.05), memory=NoMemory())",
        "LeaderTopK(0.05)",
        "UnionTopK(0.05)",
    ],
)
@pytest.mark.parametrize("worker", [0, 1, 2])
def test_numbers_that_are_not_finite_are_noticed_at_once(scheme: str, worker: int) -> None:
    """Whether they are sent or not."""
    simulation = Simulation(sw.parse(scheme), SHAPES, WORKERS, CPU)
    for step in range(4):  # as real workers do in the second
        fill(simulation, gradients(step))
        simulation.exchange()
        assert simulation.flaw is None
    simulation.gradients[worker][5] = float("nan")
    simulation.exchange()
    assert simulation.flaw is not None
    assert simulation.flaw.step == 4
    assert simulation.flaw.is_non_finite


def test_what_is_kept_back_can_be_scaled() -> None:
    """A rate ten times smaller and memories ten times larger: updates as if γ were inside them."""
    given = gradients(0)
    sums = []
    for rate, factor in ((1.0, 1.0), (0.1, 10.0)):
        simulation = Simulation(sw.parse("TopK(0.05)"), SHAPES, WORKERS, CPU)
        fill(simulation, given)
        simulation.exchange()
        simulation.scale(factor)
        for gradient in simulation.gradients:
            gradient.zero_()
        simulation.exchange()
        sums.append(rate * simulation.gradients[0])
    assert float(sums[0].abs().max()) > 0
    torch.testing.assert_close(sums[0], sums[1])
