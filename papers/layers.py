"""Batch normalisation per worker, and copies of the gradients of weights.

It runs in plain torch on a CPU, and in six Triton kernels on CUDA.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor, nn

_HAS_TRITON = find_spec("triton") is not None


def forward(rows: Tensor, layer: nn.BatchNorm2d, workers: int) -> tuple[Tensor, Tensor]:
    """Return the normalised rows, and their mean and inverse deviation as (2, worker, channel).

    The running statistics of `layer` are updated with those of worker 0, as in DDP.
    """
    if _is_fast(rows):
        from . import layers_cuda

        return layers_cuda.forward(rows, layer, workers)
    assert layer.momentum is not None
    results, moments = [], []
    for worker, mine in enumerate(rows.chunk(workers)):
        running = (layer.running_mean, layer.running_var) if worker == 0 else (None, None)
        result, *found = torch.native_batch_norm(
            mine, layer.weight, layer.bias, *running, True, layer.momentum, layer.eps
        )
        results.append(result)
        moments.append(torch.stack(found))
    return torch.cat(results), torch.stack(moments, dim=1)


def backward(
    slopes: Tensor, rows: Tensor, gain: Tensor, moments: Tensor, gains: Tensor, shifts: Tensor
) -> Tensor:
    """Return the gradient of the rows. Write the gradients of gain and shift, (worker, channel)."""
    if _is_fast(rows):
        from . import layers_cuda

        return layers_cuda.backward(slopes, rows, gain, moments, gains, shifts)
    eps = 0.0  # included in the inverse deviation
    workers, results = moments.shape[1], []
    each = zip(slopes.chunk(workers), rows.chunk(workers), moments.unbind(1), strict=True)
    for worker, (my_slopes, mine, (mean, inverse)) in enumerate(each):
        result, gains[worker], shifts[worker] = torch.ops.aten.native_batch_norm_backward(
            my_slopes, mine, gain, None, None, mean, inverse, True, eps, [True, True, True]
        )
        results.append(result)
    return torch.cat(results)


def copy_weights(found: Tensor, place: Tensor) -> None:
    """Copy `found` to `place`, which may have another type and memory order."""
    if _is_fast(found):
        from . import layers_cuda

        layers_cuda.copy_weights(found, place)
    else:
        place.copy_(found)


def _is_fast(rows: Tensor) -> bool:
    return rows.is_cuda and _HAS_TRITON and rows.shape[1] % 64 == 0
