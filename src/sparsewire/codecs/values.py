"""What a value codec is, and where the values that it writes belong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..notation import Part
from ..segments import Segments
from ..workspace import Workspace


@dataclass(frozen=True)
class Place:
    """Where values belong: selected ones to `indices` in turn, the rest to the dense segments.

    `key` seeds what is random about writing them. `work` is this rank's: tables may be kept there.
    """

    indices: Tensor
    segments: Segments
    key: int
    work: Workspace


class ValueCodec(Part, ABC):
    """Writes values.

    What a lossy codec changed is put back into the memory by the exchange, so a codec only has to
    be close, not exact. `linear`: messages may be added, as numbers of `dtype`, which an
    all-reduce needs. `quantizes`: selected values take a few bits, and a tensor that is sent whole
    does not, so a scheme that sends everything would not be quantized at all.
    """

    linear: ClassVar[bool]
    quantizes: ClassVar[bool] = False
    dtype: ClassVar[torch.dtype]

    @abstractmethod
    def nbytes(self, segments: Segments) -> int:
        """Bytes that the values of one message take."""

    @abstractmethod
    def exact(self, dtype: torch.dtype) -> bool:
        """Whether values of `dtype` come back unchanged, all of them."""

    @abstractmethod
    def encode(self, values: Tensor, place: Place) -> Tensor:
        """Values as a flat uint8 tensor of `nbytes(place.segments)`."""

    @abstractmethod
    def decode(self, data: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
        """The values again, in `dtype`."""


def to_bytes(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as bytes of a type that may be narrower; what is too large becomes the largest."""
    limit = torch.finfo(dtype).max
    if torch.finfo(values.dtype).max > limit:
        values = values.clamp(-limit, limit)
    return values.to(dtype).contiguous().view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers again; bytes may start anywhere in a message, numbers may not."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)
