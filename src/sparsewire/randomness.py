"""Random numbers from a counter: the same on every device, without a generator to save or disturb.

A number is a hash of its purpose (seed, step, segment, rank). Any rank can therefore compute any
other rank's choices, and a resumed run draws the same numbers as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MUL1 = 0xBF58476D1CE4E5B9
_MUL2 = 0x94D049BB133111EB


def signed(word: int) -> int:
    """Return the int64 with the same 64 bits."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


def mix_int(word: int) -> int:
    """Return one SplitMix64 step of a Python integer, equal to `mix`."""
    word = (word + _GAMMA) & _MASK
    word = ((word ^ (word >> 30)) * _MUL1) & _MASK
    word = ((word ^ (word >> 27)) * _MUL2) & _MASK
    return word ^ (word >> 31)


def mix(words: Tensor) -> Tensor:
    """Return one SplitMix64 step of every int64 of a tensor (int64 arithmetic wraps around)."""
    words = words + signed(_GAMMA)
    words = (words ^ ((words >> 30) & ((1 << 34) - 1))) * signed(_MUL1)
    words = (words ^ ((words >> 27) & ((1 << 37) - 1))) * signed(_MUL2)
    return words ^ ((words >> 31) & ((1 << 33) - 1))


def fold(*words: int) -> int:
    """Return one key for several integers, which depends on their order."""
    key = 0
    for word in words:
        key = join(key, word)
    return key


def join(key: int, word: int) -> int:
    """Return the `fold` of the integers of `key` and one more."""
    return mix_int(key ^ (word & _MASK))


@dataclass(frozen=True)
class RandomKey:
    """The source of the random choices of one rank in one step."""

    seed: int
    step: int
    rank: int

    def key(self, shared: bool) -> int:
        """Return one integer for this step: this rank's own, or the same on all ranks."""
        return fold(self.seed, self.step, 0 if shared else self.rank + 1)


def checksum_int(words: Sequence[int], key: int) -> int:
    """Return 64 bits that depend on every bit of the words and the key, equal to `checksum`."""
    total = sum(mix_int(w ^ (place * _GAMMA & _MASK)) for place, w in enumerate(words, start=1))
    return mix_int((total & _MASK) ^ mix_int(key & _MASK))


def checksum(words: Tensor, key: int) -> Tensor:
    """Return the checksum of an int64 tensor: the sum of hashes of each word and its position."""
    places = torch.arange(1, words.numel() + 1, device=words.device) * signed(_GAMMA)
    return mix(mix(words ^ places).sum() ^ signed(mix_int(key & _MASK)))


def name_key(name: str) -> int:
    """Return a signed 64-bit hash of a name, the same in every process."""
    return int.from_bytes(
        hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True
    )


def stream(names: Tensor, key: int) -> Tensor:
    """Return one int64 for each name, for the given key."""
    return mix(names ^ signed(key))


def below(words: Tensor, bounds: Tensor) -> Tensor:
    """Return hashed words as integers in [0, bound), with a bias below bound / 2^63."""
    return (words & ((1 << 63) - 1)) % bounds
