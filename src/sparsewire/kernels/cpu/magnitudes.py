"""Lloyd's algorithm for the magnitudes of quantized values, segment by segment."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import reference
from .jit import Array, array, is_flat, jit

_MOST = np.finfo(np.float32).max


def fit_magnitudes(
    values: Tensor, counts: Tensor, shares: Tensor, levels: int
) -> tuple[Tensor, Tensor]:
    if not is_flat(values, torch.float32):
        return reference.fit_magnitudes(values, counts, shares, levels)
    magnitudes = torch.empty((levels, counts.numel()), dtype=torch.float32)
    number = torch.empty(values.numel(), dtype=torch.int64)
    first = np.array(reference.first_magnitudes(levels))
    limits = array(counts.contiguous()), array(shares.contiguous())
    rounds = reference.ITERATIONS
    _fit(array(values), *limits, first, rounds, array(magnitudes), array(number))
    return magnitudes, number


@jit
def _fit(
    values: Array,
    counts: Array,
    shares: Array,
    first: Array,
    rounds: int,
    magnitudes: Array,
    number: Array,
) -> None:
    """Fit the magnitudes. Reads the values of a segment once for each iteration, and twice more."""
    levels = len(first)
    edges, sums = np.empty(levels - 1), np.empty(levels)
    lengths = np.empty(levels, np.int64)
    start = 0
    for segment in range(len(counts)):
        mine = values[start : start + counts[segment]]
        total = 0.0
        for value in mine:
            total += abs(np.float64(value))
        mean = total / max(shares[segment], 1)
        for level in range(levels):
            magnitudes[level, segment] = np.float32(min(mean * first[level], _MOST))
        for _ in range(rounds):
            _find_edges(magnitudes, segment, edges)
            sums[:] = 0
            lengths[:] = 0
            for value in mine:
                level = _nearest(value, edges)
                sums[level] += abs(np.float64(value))
                lengths[level] += 1
            lengths[0] -= counts[segment] - shares[segment]  # padding is not a value
            for level in range(levels):
                if lengths[level] > 0:
                    mean = sums[level] / lengths[level]
                    magnitudes[level, segment] = np.float32(min(mean, _MOST))
        _find_edges(magnitudes, segment, edges)
        for place in range(len(mine)):
            number[start + place] = _nearest(mine[place], edges)
        start += counts[segment]


@jit
def _find_edges(magnitudes: Array, segment: int, edges: Array) -> None:
    """Write the midpoints between neighbouring magnitudes."""
    for level in range(len(edges)):
        low = np.float64(magnitudes[level, segment])
        edges[level] = (low + np.float64(magnitudes[level + 1, segment])) / 2


@jit
def _nearest(value: Any, edges: Array) -> int:
    """Return the number of edges below a magnitude."""
    size, level = abs(np.float64(value)), 0
    for edge in edges:
        level += int(size > edge)  # without a branch
    return level
