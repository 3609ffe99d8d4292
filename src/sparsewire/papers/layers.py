"""Batch normalisation that keeps workers apart, and copies of the gradients of weights.

On a CPU in plain torch; on CUDA in six kernels that Triton compiles.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor, nn

_HAS_TRITON = find_spec("triton") is not None


def forward(rows: Tensor, layer: nn.BatchNorm2d, workers: int) -> tuple[Tensor, Tensor]:
    """Normalised rows, and their moments: mean and inverse deviation, (2, worker, channel).

    The running statistics of `layer` become those of worker 0, as in DDP.
    """
    if _is_fast(rows):
        from . import layers_cuda

        return layers_cuda.forward(rows, layer, workers)
    apart = rows.view(workers, -1, *rows.shape[1:]).float()
    count = apart[0, :, 0].numel()
    mean = apart.mean(dim=(1, 3, 4))
    variance = apart.var(dim=(1, 3, 4), unbiased=False)
    _update(layer, mean[0], variance[0], count)
    moments = torch.stack([mean, (variance + layer.eps).rsqrt()])
    result = _spread(layer.weight) * _plain(apart, moments) + _spread(layer.bias)
    return result.flatten(0, 1).to(rows.dtype), moments


def backward(
    slopes: Tensor, rows: Tensor, gain: Tensor, moments: Tensor, gains: Tensor, shifts: Tensor
) -> Tensor:
    """The gradient of the rows; those of gain and shift, (worker, channel), go to their places."""
    if _is_fast(rows):
        from . import layers_cuda

        return layers_cuda.backward(slopes, rows, gain, moments, gains, shifts)
    workers = moments.shape[1]
    apart = slopes.view(workers, -1, *slopes.shape[1:]).float()
    plain = _plain(rows.view(workers, -1, *rows.shape[1:]).float(), moments)
    count = apart[0, :, 0].numel()
    gains.copy_((apart * plain).sum(dim=(1, 3, 4)))
    shifts.copy_(apart.sum(dim=(1, 3, 4)))
    centred = apart - (_spread(shifts) + plain * _spread(gains)) / count
    return (_spread(gain * moments[1]) * centred).flatten(0, 1).to(slopes.dtype)


def copy_weights(found: Tensor, place: Tensor) -> None:
    """place = found, which may be of another type and order in memory."""
    if _is_fast(found):
        from . import layers_cuda

        layers_cuda.copy_weights(found, place)
    else:
        place.copy_(found)


def _update(layer: nn.BatchNorm2d, mean: Tensor, variance: Tensor, count: int) -> None:
    """Take a batch of `count` pixels into the running statistics."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.momentum is not None
    layer.running_mean.lerp_(mean, layer.momentum)
    layer.running_var.lerp_(variance * (count / (count - 1)), layer.momentum)


def _is_fast(rows: Tensor) -> bool:
    return rows.is_cuda and _HAS_TRITON and rows.shape[1] % 64 == 0


def _spread(channels: Tensor) -> Tensor:
    """(…, channel) as (worker, row, channel, height, width)."""
    apart = channels if channels.dim() == 2 else channels[None]
    return apart[:, None, :, None, None]


def _plain(apart: Tensor, moments: Tensor) -> Tensor:
    return (apart - _spread(moments[0])) * _spread(moments[1])
