"""Packed integers and flags: what is packed comes back, and the bytes are those written down."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from sparsewire.kernels import bits

from ..laws.cases import LAWFUL


@pytest.mark.parametrize("width", range(17))
@given(data=st.data())
@LAWFUL
def test_what_is_packed_comes_back(width: int, data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, 2**width - 1), max_size=40))
    values = torch.tensor(numbers, dtype=torch.int64)
    packed = bits.pack(values, width)
    assert packed.dtype == torch.uint8
    assert packed.numel() == bits.packed_bytes(len(numbers), width)
    assert bits.unpack(packed, len(numbers), width).tolist() == numbers


@pytest.mark.parametrize("width", [20, 31, 33, 40])
def test_wider_integers_come_back_too(width: int) -> None:
    values = torch.tensor([0, 1, 2**width - 1, 2 ** (width - 1), 12345, 7, 6, 5, 4])
    assert torch.equal(bits.unpack(bits.pack(values, width), 9, width), values)


@pytest.mark.parametrize("width", range(1, 9))
@given(data=st.data())
@LAWFUL
def test_bytes_are_those_of_numpy(width: int, data: st.DataObject) -> None:
    """Up to eight bits: one stream of bits, the lowest first."""
    numbers = data.draw(st.lists(st.integers(0, 2**width - 1), max_size=40))
    padded = numbers + [0] * (-len(numbers) % 8)
    stream = [(number >> bit) & 1 for number in padded for bit in range(width)]
    expected = np.packbits(np.array(stream, dtype=np.uint8), bitorder="little")
    assert bits.pack(torch.tensor(numbers, dtype=torch.int64), width).tolist() == expected.tolist()


def test_wide_integers_are_cut_into_slices_lowest_first() -> None:
    packed = bits.pack(torch.tensor([0x1FF, 0, 0, 0, 0, 0, 0, 0x0AB]), 9)
    assert packed.tolist() == [0xFF, 0, 0, 0, 0, 0, 0, 0xAB, 0x01]


@given(st.integers(1, 100).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
@LAWFUL
def test_flags(case: tuple[int, set[int]]) -> None:
    count, positions = case
    data = bits.set_flags(torch.tensor(sorted(positions), dtype=torch.int64), count)
    row = np.zeros(count, dtype=np.uint8)
    row[sorted(positions)] = 1
    assert data.dtype == torch.uint8
    assert data.tolist() == np.packbits(row, bitorder="little").tolist()
    found = bits.find_flags(data, len(positions) + 1).tolist()
    assert found == [*sorted(positions), 8 * data.numel()]  # and there are no more
    assert bits.find_flags(data, 1).tolist() == found[:1]


@pytest.mark.parametrize("byte", range(256))
def test_every_byte_of_flags(byte: int) -> None:
    positions = [bit for bit in range(8) if byte >> bit & 1]
    assert bits.set_flags(torch.tensor(positions, dtype=torch.int64), 8).tolist() == [byte]
    found = bits.find_flags(torch.tensor([byte], dtype=torch.uint8), 9)
    assert found.tolist() == positions + [8] * (9 - len(positions))
