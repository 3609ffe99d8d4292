"""Index codecs: how coordinates are encoded as bytes.

Indices are ascending, and the number of bytes follows from the segments alone. Index `size`, one
past the last coordinate, is the padding index: it fills the slots that a selector with a varying
count leaves unused, after all other indices.
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
    """Base class of index codecs.

    Attributes:
        written: True if indices are sent. Otherwise the receiver derives them.
    """

    written: ClassVar[bool]

    @abstractmethod
    def nbytes(self, segments: Segments) -> int:
        """Return the number of bytes of the indices of one message."""

    @abstractmethod
    def encode(self, indices: Tensor, segments: Segments) -> Tensor:
        """Return the indices as a flat uint8 tensor of `nbytes(segments)` bytes."""

    @abstractmethod
    def decode(self, data: Tensor, segments: Segments) -> Tensor:
        """Return the indices as int64. Corrupt bytes give arbitrary numbers, but no error."""


@dataclass(frozen=True, repr=False)
class EliasFano(IndexCodec):
    """Encode indices in about log₂(n/k) + 2 bits each, where k of n coordinates are sent.

    That is 8.56 bits per index at 1 % and 11.95 at 0.1 %, within 6 % of the entropy of random
    coordinates. There is no limit on the number of coordinates. It is the default for selectors
    whose choice depends on the gradient.

    With b = ⌊log₂(n/k)⌋, the low b bits of every index are stored as they are, and the high bits as
    k flags among n/2^b: k·(b + 1) + n/2^b bits in all.

    >>> import sparsewire as sw
    >>> scheme = sw.Scheme(sw.TopK(0.01))
    >>> segments = scheme.partition({"w": (1000, 1000)})
    >>> scheme.indices, 8 * scheme.indices.nbytes(segments) / segments.capacity
    (EliasFano(), 8.5632)

    Reference: Elias 1974; Fano 1971.
    """

    written = True

    @staticmethod
    def low_bits(segments: Segments) -> int:
        """Return b, the number of low bits that are stored as they are."""
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
    """Encode indices as one bit per coordinate.

    It is the default if a rank sends more than about a quarter of the coordinates.

    >>> import sparsewire as sw
    >>> sw.Scheme(sw.TopK(0.5)).indices
    Bitmap()
    """

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
    """Encode indices in 32 bits each, without packing, which other programs can read easily.

    Indices count from the start of the gradients that are exchanged together: a bucket, or the
    model with `scope='global'`. They reach 2^31 coordinates.

    >>> import sparsewire as sw
    >>> sw.Scheme(sw.TopK(0.01), indices=sw.Int32())
    Scheme(TopK(0.01), indices=Int32())
    """

    written = True

    def nbytes(self, segments: Segments) -> int:
        return 4 * segments.capacity

    def encode(self, indices: Tensor, segments: Segments) -> Tensor:
        if segments.size >= 2**31:
            raise SchemeError(
                f"Int32 indices reach 2^31 coordinates, and this gradient has {segments.size}. "
                f"Use indices=EliasFano()"
            )
        return indices.to(torch.int32).view(torch.uint8)

    def decode(self, data: Tensor, segments: Segments) -> Tensor:
        return data.view(torch.int32).long()


@dataclass(frozen=True, repr=False)
class Implied(IndexCodec):
    """Send no indices, because every rank can derive them.

    It is the default for the random selectors, `TopBlock` and `Dense`.

    >>> import sparsewire as sw
    >>> sw.Scheme(sw.RandomK(0.01)).indices
    Implied()
    """

    written = False

    def nbytes(self, segments: Segments) -> int:
        return 0

    def encode(self, indices: Tensor, segments: Segments) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=indices.device)

    def decode(self, data: Tensor, segments: Segments) -> Tensor:
        raise NotImplementedError("implied indices come from the selector")
