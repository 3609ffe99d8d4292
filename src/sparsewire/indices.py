"""How coordinates are written: an index codec turns ascending indices into bytes and back.

The number of bytes follows from the segments alone. Index `size`, one past the last coordinate, is
"nowhere": it fills the room that a selector with a varying count leaves, behind all other indices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from . import kernels
from .errors import SchemeError
from .kernels import bits
from .notation import Part
from .segments import Segments


class IndexCodec(Part, ABC):
    """Writes indices. `written`: bytes are sent; otherwise the reader works the indices out."""

    written: ClassVar[bool]

    @abstractmethod
    def nbytes(self, segments: Segments) -> int:
        """Bytes that the indices of one message take."""

    @abstractmethod
    def encode(self, indices: Tensor, segments: Segments) -> Tensor:
        """Indices as a flat uint8 tensor of `nbytes(segments)`."""

    @abstractmethod
    def decode(self, data: Tensor, segments: Segments) -> Tensor:
        """The indices again, as int64; of damaged bytes any numbers, and no error."""


@dataclass(frozen=True, repr=False)
class EliasFano(IndexCodec):
    """About 1.5 bits over the logarithm of the spacing: 8.56 bits per index at 1 %.

    With b = ⌊log₂(n/k)⌋, the low b bits of every index are written as they are, and the high bits
    as k flags among n/2^b: k·(b + 1) + n/2^b bits, within 6 % of the entropy of random coordinates.

    Reference: Elias 1974; Fano 1971.
    """

    written = True

    @staticmethod
    def low_bits(segments: Segments) -> int:
        """b: how many bits of an index are written as they are."""
        spacing = segments.size // max(1, segments.room)
        return max(0, spacing.bit_length() - 1)

    def _flags(self, segments: Segments) -> int:
        return segments.room + (segments.size >> self.low_bits(segments)) + 1

    def nbytes(self, segments: Segments) -> int:
        if not segments.room:
            return 0
        low = bits.packed_bytes(segments.room, self.low_bits(segments))
        return low + bits.packed_bytes(self._flags(segments), 1)

    def encode(self, indices: Tensor, segments: Segments) -> Tensor:
        if not segments.room:
            return torch.empty(0, dtype=torch.uint8, device=indices.device)
        width = self.low_bits(segments)
        kernel = kernels.on(indices.device)
        high = (indices >> width).add_(_numbers(segments, indices.device))
        flags = kernel.set_flags(high, self._flags(segments))
        return torch.cat([kernel.pack(indices, width), flags])

    def decode(self, data: Tensor, segments: Segments) -> Tensor:
        if not segments.room:
            return torch.empty(0, dtype=torch.int64, device=data.device)
        width = self.low_bits(segments)
        split = bits.packed_bytes(segments.room, width)
        kernel = kernels.on(data.device)
        flags = kernel.find_flags(data[split:], segments.room + 1)
        high = flags[:-1] - _numbers(segments, data.device)
        indices = high.bitwise_left_shift_(width).add_(
            kernel.unpack(data[:split], segments.room, width)
        )
        return _exactly(indices, flags[-1] == 8 * data[split:].numel(), segments)


@dataclass(frozen=True, repr=False)
class Bitmap(IndexCodec):
    """One bit per coordinate: the smallest where more than about a quarter of them travel."""

    written = True

    def nbytes(self, segments: Segments) -> int:
        return bits.packed_bytes(segments.size, 1) if segments.room else 0

    def encode(self, indices: Tensor, segments: Segments) -> Tensor:
        if not segments.room:
            return torch.empty(0, dtype=torch.uint8, device=indices.device)
        # "nowhere" lies behind the last flag, maybe in the last byte: put it out of reach
        inside = indices.masked_fill(indices == segments.size, 8 * self.nbytes(segments))
        return kernels.on(indices.device).set_flags(inside, segments.size)

    def decode(self, data: Tensor, segments: Segments) -> Tensor:
        if not segments.room:
            return torch.empty(0, dtype=torch.int64, device=data.device)
        end = 8 * data.numel()
        flags = kernels.on(data.device).find_flags(data, segments.room + 1)
        # flags between `size` and `end` stand for no coordinate: they stay, and are out of range
        indices = flags[:-1].masked_fill(flags[:-1] == end, segments.size)
        return _exactly(indices, flags[-1] == end, segments)


@dataclass(frozen=True, repr=False)
class Int32(IndexCodec):
    """32 bits per index, counted from the start of the exchanged gradient."""

    written = True

    def nbytes(self, segments: Segments) -> int:
        return 4 * segments.room

    def encode(self, indices: Tensor, segments: Segments) -> Tensor:
        if segments.size >= 2**31:
            raise SchemeError(
                f"Int32 indices reach 2^31 coordinates and this gradient has {segments.size}: "
                f"use indices=EliasFano()"
            )
        return indices.to(torch.int32).view(torch.uint8)

    def decode(self, data: Tensor, segments: Segments) -> Tensor:
        return data.view(torch.int32).long()


@dataclass(frozen=True, repr=False)
class Implied(IndexCodec):
    """No bits at all: the selector's choice can be computed by every rank."""

    written = False

    def nbytes(self, segments: Segments) -> int:
        return 0

    def encode(self, indices: Tensor, segments: Segments) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=indices.device)

    def decode(self, data: Tensor, segments: Segments) -> Tensor:
        raise NotImplementedError("implied indices come from the selector")


def _numbers(segments: Segments, device: torch.device) -> Tensor:
    """0, 1, 2 … for every slot, kept for every later step."""
    key = ("numbers", device)
    if key not in segments.scratch:
        segments.scratch[key] = torch.arange(segments.room, device=device)
    numbers: Tensor = segments.scratch[key]
    return numbers


def _exactly(indices: Tensor, is_all: Tensor, segments: Segments) -> Tensor:
    """The indices; out of range if there were more of them than room."""
    indices[-1] = torch.where(is_all, indices[-1], segments.size + 1)
    return indices


ALL: tuple[type[IndexCodec], ...] = (EliasFano, Bitmap, Int32, Implied)
