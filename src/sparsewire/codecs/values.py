"""The base class of value codecs."""

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
    """Which coordinates the values of a message belong to.

    Arguments:
        indices: The coordinates of the selected values, which come first. The values of the
            segments that are sent densely follow.
        segments: The segments of the gradient.
        key: The seed of random rounding.
        work: This rank's workspace, where tables may be kept.
    """

    indices: Tensor
    segments: Segments
    key: int
    work: Workspace


class ValueCodec(Part, ABC):
    """Base class of value codecs.

    The exchange puts the error of a lossy codec back into the residual, so a codec need not be
    exact.

    Attributes:
        linear: True if encoded values are numbers of `dtype` that may be summed, as an all-reduce
            does.
        quantizes: True if selected values take a few bits, and values that are sent densely do
            not. Such a codec does nothing for a scheme that sends everything.
        dtype: The type of the encoded numbers.
    """

    linear: ClassVar[bool]
    quantizes: ClassVar[bool] = False
    dtype: ClassVar[torch.dtype]

    @abstractmethod
    def nbytes(self, segments: Segments) -> int:
        """Return the number of bytes of the values of one message."""

    @abstractmethod
    def exact(self, dtype: torch.dtype) -> bool:
        """Return whether all values of `dtype` come back unchanged."""

    @abstractmethod
    def encode(self, values: Tensor, place: Place) -> Tensor:
        """Return the values as a flat uint8 tensor of `nbytes(place.segments)` bytes."""

    @abstractmethod
    def decode(self, data: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
        """Return the values of encoded bytes, as `dtype`."""


def to_bytes(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers as bytes of a type. Numbers beyond its range become its largest ones."""
    limit = torch.finfo(dtype).max
    if torch.finfo(values.dtype).max > limit:
        values = values.clamp(-limit, limit)
    return values.to(dtype).contiguous().view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of bytes that may start anywhere in a message."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)
