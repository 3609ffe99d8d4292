"""Numbers from a counter: the same everywhere, well mixed, and permutations that are ones."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from sparsewire.kernels.counter import below, fold, mix, mix_int, name_key, shuffled, stream

from ..laws.cases import LAWFUL

words = st.integers(-(2**63), 2**63 - 1)


def unsigned(word: int) -> int:
    return word & (2**64 - 1)


def test_mix_is_splitmix64() -> None:
    """The first two numbers of the published generator for seed 1234567."""
    gamma = 0x9E3779B97F4A7C15
    assert mix_int(1234567) == 6457827717110365317
    assert mix_int(1234567 + gamma) == 3203168211198807973


@given(st.lists(words, min_size=1, max_size=20))
@LAWFUL
def test_tensor_and_integer_twins_agree(numbers: list[int]) -> None:
    mixed = mix(torch.tensor(numbers, dtype=torch.int64)).tolist()
    assert [unsigned(word) for word in mixed] == [mix_int(unsigned(n)) for n in numbers]


def test_mix_does_not_change_its_argument() -> None:
    given_words = torch.arange(5)
    mix(given_words)
    assert given_words.tolist() == [0, 1, 2, 3, 4]


@given(st.lists(words, min_size=1, max_size=4), st.integers(0, 3), st.integers(1, 2**63 - 1))
@LAWFUL
def test_every_folded_word_counts(numbers: list[int], place: int, change: int) -> None:
    other = list(numbers)
    other[place % len(other)] ^= change
    assert fold(*other) != fold(*numbers)


def test_order_and_number_of_folded_words_count() -> None:
    keys = {fold(1, 2), fold(2, 1), fold(1, 2, 0), fold(0, 1, 2), fold(1), fold()}
    assert len(keys) == 6


def test_names_keep_their_keys() -> None:
    """Pinned: another hash would make a resumed run draw other coordinates."""
    assert name_key("layer.weight") == -6063737920367521029
    assert name_key("") != name_key("\0")
    assert -(2**63) <= name_key("ü") < 2**63


def test_streams_differ_by_name_and_key() -> None:
    names = torch.tensor([name_key(f"layer {number}") for number in range(100)])
    drawn = torch.cat([stream(names, key) for key in range(20)])
    assert len(set(drawn.tolist())) == 2000


@given(words, st.integers(1, 2**40))
@LAWFUL
def test_below_stays_below(word: int, bound: int) -> None:
    number = int(below(torch.tensor([word]), torch.tensor([bound])))
    assert 0 <= number < bound


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 16, 97, 1000])
def test_shuffled_is_a_permutation(length: int) -> None:
    positions = torch.arange(length)
    lengths = torch.full((length,), length)
    for key in range(20):
        keys = torch.full((length,), mix_int(key) >> 1)
        image = shuffled(positions, lengths, keys)
        assert image.sort().values.tolist() == list(range(length))


def test_shuffles_of_different_lengths_run_side_by_side() -> None:
    lengths = [3, 10, 1]
    keys = [11, 12, 13]
    separate = [
        shuffled(torch.arange(n), torch.full((n,), n), torch.full((n,), key))
        for n, key in zip(lengths, keys, strict=True)
    ]
    joint = shuffled(
        torch.cat([torch.arange(n) for n in lengths]),
        torch.repeat_interleave(torch.tensor(lengths), torch.tensor(lengths)),
        torch.repeat_interleave(torch.tensor(keys), torch.tensor(lengths)),
    )
    assert torch.equal(joint, torch.cat(separate))


def test_every_permutation_of_three_is_as_likely() -> None:
    keys = mix(torch.arange(6000)).repeat_interleave(3)
    image = shuffled(torch.arange(3).repeat(6000), torch.full((18000,), 3), keys).view(-1, 3)
    codes = image @ torch.tensor([9, 3, 1])
    counts = codes.unique(return_counts=True)[1]
    assert len(counts) == 6
    assert (counts - 1000).abs().max() < 4.5 * (6000 * 1 / 6 * 5 / 6) ** 0.5
