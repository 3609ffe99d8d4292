"""Index codecs: four bytes each, or none where everybody knows."""

from __future__ import annotations

import pytest
import torch

import sparsewire as sw
from sparsewire.segments import Segments, Span

from .laws.cases import alone

SEGMENTS = alone(sw.TopK(count=3), 100)


def test_int32_counts_from_the_start_of_the_gradient() -> None:
    indices = torch.tensor([0, 7, 100])  # 100 stands for nowhere
    data = sw.Int32().encode(indices, SEGMENTS)
    assert data.view(torch.int32).tolist() == [0, 7, 100]
    assert data.numel() == sw.Int32().nbytes(SEGMENTS) == 12
    assert sw.Int32().decode(data, SEGMENTS).dtype == torch.int64


def test_int32_reaches_its_limit_and_says_so() -> None:
    codec, indices = sw.Int32(), torch.tensor([2**31 - 2])
    largest = Segments((Span("x", (2**31 - 1,), 0),), (), ())
    assert codec.decode(codec.encode(indices, largest), largest).tolist() == [2**31 - 2]
    beyond = Segments((Span("x", (2**31,), 0),), (), ())
    with pytest.raises(sw.SchemeError, match=r"2\^31 coordinates .* use scope='layer'"):
        codec.encode(indices, beyond)


def test_implied_sends_nothing() -> None:
    data = sw.Implied().encode(torch.tensor([1, 2, 3]), SEGMENTS)
    assert (data.numel(), data.dtype, sw.Implied().nbytes(SEGMENTS)) == (0, torch.uint8, 0)
    with pytest.raises(NotImplementedError, match="from the selector"):
        sw.Implied().decode(data, SEGMENTS)
