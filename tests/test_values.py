"""Value codecs: widths, rounding to the nearest, and what is too large."""

from __future__ import annotations

import pytest
import torch

import sparsewire as sw
from sparsewire.values import ValueCodec


@pytest.mark.parametrize(
    ("codec", "width", "exact"),
    [
        (sw.Float32(), 4, [torch.float16, torch.bfloat16, torch.float32]),
        (sw.BFloat16(), 2, [torch.bfloat16]),
        (sw.Float16(), 2, [torch.float16]),
    ],
    ids=repr,
)
def test_width_and_exactness(codec: ValueCodec, width: int, exact: list[torch.dtype]) -> None:
    assert codec.linear
    assert codec.nbytes(10) == 10 * width
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    assert [dtype for dtype in types if codec.exact(dtype)] == exact


@pytest.mark.parametrize(
    ("codec", "given", "read"),
    [
        (sw.Float16(), 1e30, 65504.0),
        (sw.Float16(), -65519.0, -65504.0),
        (sw.Float16(), 1e-9, 0.0),
        (sw.Float16(), 1.0004, 1.0),
        (sw.BFloat16(), 3.4e38, 3.3895313892515355e38),
        (sw.BFloat16(), 1.003, 1.0),
        (sw.Float32(), 0.1, 0.10000000149011612),
    ],
)
def test_rounding(codec: ValueCodec, given: float, read: float) -> None:
    values = torch.tensor([given, -given])
    assert codec.decode(codec.encode(values), torch.float32).tolist() == [read, -read]


def test_float32_of_doubles_too_large() -> None:
    values = torch.tensor([1e300, -1e300], dtype=torch.float64)
    limit = torch.finfo(torch.float32).max
    assert sw.Float32().decode(sw.Float32().encode(values), torch.float64).tolist() == [
        limit,
        -limit,
    ]


@pytest.mark.parametrize("codec", [sw.Float32(), sw.BFloat16(), sw.Float16()], ids=repr)
def test_encoding_leaves_values_alone_and_takes_any_layout(codec: ValueCodec) -> None:
    values = torch.arange(10.0)[::2]
    kept = values.clone()
    data = codec.encode(values)
    assert torch.equal(values, kept)
    assert torch.equal(codec.decode(data, torch.float32), kept)


def test_signs_of_zero_survive() -> None:
    for codec in (sw.Float32(), sw.BFloat16(), sw.Float16()):
        read = codec.decode(codec.encode(torch.tensor([-0.0, 0.0])), torch.float32)
        assert read.signbit().tolist() == [True, False]
