"""How coordinates are written: an index codec turns ascending indices into bytes and back.

The number of bytes follows from the segments alone. Index `size`, one past the last coordinate, is
the padding index: it fills the room that a selector with a varying count leaves, behind all other
indices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..errors import SchemeError
from ..kernels import bits
from ..notation import Part
from ..segments import Segments


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
        """The indices again, as int64; of corrupt bytes any numbers, and no error."""


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
        spacing = segments.size // max(1, segments.capacity)
        return max(0, spacing.bit_length() - 1)

    def nbytes(self, segments: Segments) -> int:
        if not segments.capacity:
            return 0
        width = self.low_bits(segments)
        flags = bits.ascending_flags(segments.capacity, segments.size, width)
        return bits.packed_bytes(segments.capacity, width) + bits.packed_bytes(flags, 1)

    def encode(self, indices: Tensor, segments: Segments) -> Tensor:
        if not segments.capacity:
            return torch.empty(0, dtype=torch.uint8, device=indices.device)
        kernel = kernels.on(indices.device)
        return kernel.write_ascending(indices, self.low_bits(segments), segments)

    def decode(self, data: Tensor, segments: Segments) -> Tensor:
        if not segments.capacity:
            return torch.empty(0, dtype=torch.int64, device=data.device)
        kernel = kernels.on(data.device)
        return kernel.read_ascending(data, self.low_bits(segments), segments)


@dataclass(frozen=True, repr=False)
class Bitmap(IndexCodec):
    """One bit per coordinate: the smallest where more than about a quarter of them travel."""

    written = True

    def nbytes(self, segments: Segments) -> int:
        return bits.packed_bytes(segments.size, 1) if segments.capacity else 0

    def encode(self, indices: Tensor, segments: Segments) -> Tensor:
        if not segments.capacity:
            return torch.empty(0, dtype=torch.uint8, device=indices.device)
        # the padding index lies behind the last flag, maybe in the last byte: put it out of reach
        inside = indices.masked_fill(indices == segments.size, 8 * self.nbytes(segments))
        return kernels.on(indices.device).set_flags(inside, segments.size)

    def decode(self, data: Tensor, segments: Segments) -> Tensor:
        if not segments.capacity:
            return torch.empty(0, dtype=torch.int64, device=data.device)
        end = 8 * data.numel()
        flags = kernels.on(data.device).find_flags(data, segments.capacity + 1)
        # flags between `size` and `end` stand for no coordinate: they stay, and are out of range
        indices = flags[:-1].masked_fill(flags[:-1] == end, segments.size)
        # out of range if there were more of them than room
        indices[-1] = torch.where(flags[-1] == end, indices[-1], segments.size + 1)
        return indices


@dataclass(frozen=True, repr=False)
class Int32(IndexCodec):
    """32 bits per index, counted from the start of the exchanged gradient."""

    written = True

    def nbytes(self, segments: Segments) -> int:
        return 4 * segments.capacity

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
