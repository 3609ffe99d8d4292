"""How values are written: a codec turns a tensor of values into bytes of known number and back.

What a lossy codec changed is put back into the memory by the exchange, so a codec only has to be
close, not exact. `linear` says that decoded messages may be added, which an all-reduce needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .notation import Part


class ValueCodec(Part, ABC):
    """Writes values."""

    linear: ClassVar[bool]
    dtype: ClassVar[torch.dtype]  # of the numbers on the wire

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Bytes that `count` values take."""

    @abstractmethod
    def exact(self, dtype: torch.dtype) -> bool:
        """Whether values of `dtype` come back unchanged, all of them."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Values as a flat uint8 tensor of `nbytes(len(values))`."""

    @abstractmethod
    def decode(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        """The values again, in `dtype`."""


class _Cast(ValueCodec):
    """Writes every value as one number of a narrower or equal float type."""

    linear = True

    def nbytes(self, count: int) -> int:
        return count * self.dtype.itemsize

    def exact(self, dtype: torch.dtype) -> bool:
        return torch.promote_types(self.dtype, dtype) == self.dtype

    def encode(self, values: Tensor) -> Tensor:
        limit = torch.finfo(self.dtype).max
        if torch.finfo(values.dtype).max > limit:
            # too large for the narrow type: send the largest it has, the rest stays in memory
            values = values.clamp(-limit, limit)
        return values.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        return data.view(self.dtype).to(dtype)


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


ALL: tuple[type[ValueCodec], ...] = (Float32, BFloat16, Float16)
