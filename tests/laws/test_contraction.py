"""A selector keeps what it promises: ‖x − C(x)‖² ≤ (1 − δ)‖x‖² with its own δ.

Conservation alone cannot see a selector that sends the wrong coordinates; this can.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.selectors import Selector

from .cases import Crew, examples, label, random_selectors

LENGTHS = (1, 2, 7, 40, 333)
DRAWS = 300


def vectors(length: int) -> dict[str, Tensor]:
    """Vectors that are easy, hard and impossible to compress."""
    generator = torch.Generator().manual_seed(length)
    normal = torch.randn(length, generator=generator)
    spike = torch.zeros(length)
    spike[length // 2] = -3.0
    return {
        "normal": normal,
        "heavy": normal**5,
        "flat": torch.ones(length),
        "signs": normal.sign(),
        "spike": spike,
        "tail": torch.linspace(0.01, 1, length) ** 4,
    }


def lost(selector: Selector, vector: Tensor, draws: int) -> Tensor:
    """‖x − C(x)‖² / ‖x‖² of every draw, the whole exchange being C.

    The vector is exchanged many times at once, under as many names: each draws anew.
    """
    scheme = sw.Scheme(selector, memory=sw.NoMemory(), dense_below=0, dense_1d=False)
    crew = Crew(scheme, 1, {f"copy {number}": tuple(vector.shape) for number in range(draws)})
    kept = crew.exchange([vector.repeat(draws)])[0].view(draws, -1)
    return (vector - kept).double().square().sum(dim=1) / vector.double().square().sum()


def is_exact(selector: Selector, length: int) -> bool:
    """Whether the promise holds for every single draw."""
    return not selector.coordination.is_seeded and length <= getattr(selector, "sample", length)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("selector", examples("selectors"), ids=label)
def test_contraction(selector: Selector, length: int) -> None:
    promised = 1 - selector.contraction(length)
    for name, vector in vectors(length).items():
        if is_exact(selector, length):
            assert float(lost(selector, vector, 1)) <= promised + 1e-6, name
            continue
        ratios = lost(selector, vector, DRAWS)
        error = float(ratios.std()) / len(ratios) ** 0.5
        assert float(ratios.mean()) <= promised + 4 * error + 1e-6, name


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("selector", random_selectors(), ids=label)
def test_chance_keeps_exactly_its_share_on_average(selector: Selector, length: int) -> None:
    """E‖x − C(x)‖² = (1 − k/n)‖x‖²: no more either, or the choice would not be blind."""
    expected = 1 - selector.entries(length) / length
    ratios = lost(selector, vectors(length)["tail"], DRAWS)
    error = float(ratios.std()) / len(ratios) ** 0.5
    assert abs(float(ratios.mean()) - expected) <= 4 * error + 1e-6


@pytest.mark.parametrize("selector", examples("selectors"), ids=label)
def test_promise_is_a_share(selector: Selector) -> None:
    assert all(0 < selector.contraction(length) <= 1 for length in (1, 2, 10, 1000, 200_000))


@pytest.mark.parametrize("length", [2, 7, 40, 333])
@pytest.mark.parametrize("count", [1, 2, 6, 30])
def test_top_k_keeps_the_most_that_k_coordinates_can(length: int, count: int) -> None:
    for name, vector in vectors(length).items():
        best = vector.double().square().sort(descending=True).values[count:].sum()
        expected = float(best / vector.double().square().sum())
        assert float(lost(sw.TopK(count=count), vector, 1)) == pytest.approx(expected), name
