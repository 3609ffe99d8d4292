"""Every scheme with a memory reaches the optimum of a quadratic; without one it need not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.codecs import ValueCodec
from sparsewire.memory import Memory
from sparsewire.selectors import Selector

from .cases import Crew, examples, label

WORLD, SIZE = 2, 40
CLOSE = 0.1
KEEPING = [memory for memory in examples("memory") if memory.fields]


def distance(scheme: sw.Scheme, rate: float = 0.06, steps: int = 200) -> float:
    """Distance to the optimum after training, as a share of that before.

    Worker w has f_w(x) = ½ Σ a_i (x_i − c_wi)²; the optimum of the mean is the mean of the c_w.
    """
    generator = torch.Generator().manual_seed(0)
    weights = 0.5 + torch.rand(SIZE, generator=generator)
    centres = torch.randn(WORLD, SIZE, generator=generator)
    crew = Crew(scheme, WORLD, {"x": (5, SIZE // 5)})
    position = torch.full((SIZE,), 3.0)
    optimum = centres.mean(dim=0)
    start = float((position - optimum).norm())
    for step in range(steps):
        gradients = [weights * (position - centre) for centre in centres]
        falling = rate if step < steps // 2 else rate / 10  # workers pull against each other
        position = position - falling * crew.exchange(gradients)[0]
    return float((position - optimum).norm()) / start


@pytest.mark.parametrize("selector", examples("selectors"), ids=label)
def test_every_selector_reaches_the_optimum(selector: Selector) -> None:
    assert distance(sw.Scheme(selector, dense_below=0, dense_1d=False)) < CLOSE


@pytest.mark.parametrize("codec", examples("values"), ids=label)
def test_every_value_codec_reaches_the_optimum(codec: ValueCodec) -> None:
    assert distance(sw.Scheme(sw.TopK(0.1), values=codec, dense_below=0, dense_1d=False)) < CLOSE


@pytest.mark.parametrize("memory", KEEPING, ids=label)
def test_every_memory_reaches_the_optimum(memory: Memory) -> None:
    if isinstance(memory, sw.MomentumCorrection):
        # clipped workers that pull against each other meet elsewhere
        scheme = sw.Scheme(
            sw.TopK(0.1), memory=replace(memory, clip=None), dense_below=0, dense_1d=False
        )
        assert distance(scheme, rate=0.03) < CLOSE
    else:
        assert (
            distance(sw.Scheme(sw.TopK(0.1), memory=memory, dense_below=0, dense_1d=False)) < CLOSE
        )


@pytest.mark.parametrize("scope", ["layer", "global", 8])
def test_every_scope_reaches_the_optimum(scope: str) -> None:
    assert distance(sw.Scheme(sw.TopK(0.1), scope=scope, dense_below=0, dense_1d=False)) < CLOSE  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", [sw.ErrorFeedback(), sw.NoMemory()], ids=label)
def test_top_k_can_stand_still_without_memory(memory: Memory) -> None:
    """Two workers tug at one coordinate: all that is sent cancels, and the other never moves."""

    def gradients(position: Tensor) -> list[Tensor]:
        tug = torch.tensor([3.0, 0.0])
        return [position + tug, position - tug]

    scheme = sw.Scheme(sw.TopK(count=1), memory=memory, dense_below=0, dense_1d=False)
    crew = Crew(scheme, 2, {"x": (2,)})
    position = torch.tensor([0.0, 1.0])
    for _ in range(200):
        position = position - 0.05 * crew.exchange(gradients(position))[0]
    if memory == sw.NoMemory():
        assert position.tolist() == [0.0, 1.0]
    else:
        assert abs(float(position[1])) < CLOSE
