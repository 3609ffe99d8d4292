"""How coordinates are written: an index codec turns ascending indices into bytes and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .errors import SchemeError
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
        """The indices again, as int64."""


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
                f"use scope='layer', so that buckets are exchanged one by one"
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


ALL: tuple[type[IndexCodec], ...] = (Int32, Implied)
