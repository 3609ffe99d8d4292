"""Every value as one number of a narrower or equal float type."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..segments import Segments
from .values import Place, ValueCodec, from_bytes, to_bytes


class _Cast(ValueCodec):
    """What the casts share: selected and dense values alike, one number each."""

    linear = True

    def nbytes(self, segments: Segments) -> int:
        return (segments.capacity + segments.dense_size) * self.dtype.itemsize

    def exact(self, dtype: torch.dtype) -> bool:
        return torch.promote_types(self.dtype, dtype) == self.dtype

    def encode(self, values: Tensor, place: Place) -> Tensor:
        return to_bytes(values, self.dtype)

    def decode(self, data: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
        return from_bytes(data, self.dtype).to(dtype)


@dataclass(frozen=True, repr=False)
class Float32(_Cast):
    """32 bits per value, exact for float32 gradients."""

    dtype = torch.float32


@dataclass(frozen=True, repr=False)
class BFloat16(_Cast):
    """16 bits per value: float32's range with 8 bits of precision."""

    dtype = torch.bfloat16


@dataclass(frozen=True, repr=False)
class Float16(_Cast):
    """16 bits per value: 11 bits of precision; magnitudes over 65504 are sent in instalments."""

    dtype = torch.float16
