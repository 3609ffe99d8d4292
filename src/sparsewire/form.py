"""What one message looks like: indices, values, zero bytes, and a digest of all of them.

Its size follows from the codecs and the segments alone and is known before anything is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .indices import IndexCodec
from .message import DIGEST_BYTES, seal
from .segments import Segments
from .values import ValueCodec


@dataclass(frozen=True)
class Form:
    """The layout of the messages that carry entries of `segments`, of at least `least` bytes."""

    indices: IndexCodec
    values: ValueCodec
    segments: Segments
    least: int = 0

    @cached_property
    def index_bytes(self) -> int:
        """Bytes for indices."""
        return self.indices.nbytes(self.segments)

    @cached_property
    def value_count(self) -> int:
        """Values in a message: the selected ones, then those that travel whole."""
        return self.segments.room + self.segments.whole_size

    @cached_property
    def value_bytes(self) -> int:
        """Bytes for values."""
        return self.values.nbytes(self.segments)

    @cached_property
    def padding_bytes(self) -> int:
        """Bytes behind the values, so that a message is made of whole words."""
        body = self.index_bytes + self.value_bytes
        return max(-body % 8, self.least - body - DIGEST_BYTES)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a message."""
        return self.index_bytes + self.value_bytes + self.padding_bytes + DIGEST_BYTES

    def write(self, indices: Tensor, values: Tensor, key: int) -> Tensor:
        """A message of these indices, and of values that the codec has written already."""
        places = self.indices.encode(indices, self.segments)
        rest = values.new_zeros(self.padding_bytes + DIGEST_BYTES)
        return seal(torch.cat([places, values, rest]), key)

    def cut(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """The bytes of a message's indices, and those of its values."""
        split = self.index_bytes
        return message[:split], message[split : split + self.value_bytes]
