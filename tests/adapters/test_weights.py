"""The live and the shared weights: block by block, a CPU computes the same bits as in one go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sparsewire as sw
from sparsewire.adapters.weights import BLOCK, Weights

SHAPES = {"large": (3, BLOCK // 2 + 5), "bias": (7,)}


def make(is_contiguous: bool, dtype: torch.dtype) -> Weights:
    generator = torch.Generator().manual_seed(0)
    parameters = {}
    for name, shape in SHAPES.items():
        values = torch.randn(shape, generator=generator).to(dtype)
        if not is_contiguous and len(shape) == 2:
            values = values.t().contiguous().t()
        parameters[name] = nn.Parameter(values)
    weights = Weights(parameters)
    weights.lay_out(sw.Scheme(sw.TopK(0.01)).partition(SHAPES))
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ahead", [0.0, 0.3])
def test_blocks_change_no_bit(ahead: float, dtype: torch.dtype) -> None:
    """A parameter that is not contiguous is not worked on in blocks."""

    def play(is_contiguous: bool) -> list[Tensor]:
        weights = make(is_contiguous, dtype)
        assert weights._works_in_blocks == is_contiguous
        generator = torch.Generator().manual_seed(1)

        def draw() -> Tensor:
            return torch.randn(weights.shared.shape, generator=generator)

        update, residual, found = torch.empty_like(weights.shared), draw(), []
        weights.begin(torch.empty_like(update), residual, ahead)
        for _ in range(2):
            for parameter in weights.parameters.values():
                step = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(parameter.data.float() - step)
            weights.collect(update, residual, ahead)
            found += [update.clone(), *(p.detach().clone() for p in weights.parameters.values())]
            residual, mean = draw(), draw()
            weights.advance(mean, residual, ahead)
            found += [weights.shared.clone()]
            found += [p.detach().clone() for p in weights.parameters.values()]
        return found

    for one, other in zip(play(True), play(False), strict=True):
        assert torch.equal(one, other)
