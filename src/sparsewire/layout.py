"""The layout of a message: indices, values, padding and a checksum.

Sizes follow from the codecs and the segments, and are known before anything is sent. Every message
is validated before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from . import kernels
from .codecs import IndexCodec, Place, ValueCodec
from .message import CHECKSUM_BYTES, REASONS, add_checksum, bytes_with_checksum
from .segments import ParamSlice, Segments
from .workspace import Workspace

Entries = tuple[Tensor, Tensor]  # indices; values at them, then those that are sent densely


@dataclass(frozen=True)
class MessageLayout:
    """The layout of messages with the entries of `segments`, at least `least` bytes long."""

    indices: IndexCodec
    values: ValueCodec
    segments: Segments
    least: int = 0

    @cached_property
    def index_bytes(self) -> int:
        """The number of bytes of the indices."""
        return self.indices.nbytes(self.segments)

    @cached_property
    def value_count(self) -> int:
        """The number of values: the selected ones, then those that are sent densely."""
        return self.segments.capacity + self.segments.dense_size

    @cached_property
    def value_bytes(self) -> int:
        """The number of bytes of the values."""
        return self.values.nbytes(self.segments)

    @cached_property
    def padding_bytes(self) -> int:
        """The number of bytes after the values that make the message a multiple of eight."""
        body = self.index_bytes + self.value_bytes
        return max(-body % 8, self.least - body - CHECKSUM_BYTES)

    @cached_property
    def nbytes(self) -> int:
        """The size of a message in bytes."""
        return self.index_bytes + self.value_bytes + self.padding_bytes + CHECKSUM_BYTES

    def encode_values(
        self, entries: Entries, key: int, work: Workspace
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the values as bytes, the values that readers will decode, and the error.

        The error is None if the codec is exact. `key` seeds random rounding.
        """
        indices, values = entries
        place = Place(indices, self.segments, key, work)
        data = self.values.encode(values, place)
        if self.values.exact(values.dtype):
            return data, values, None
        read = self.values.decode(data, place, values.dtype)
        return data, read, values - read

    def pack(self, indices: Tensor, data: Tensor, key: int) -> Tensor:
        """Return a message with these indices and encoded values, and a checksum keyed by `key`."""
        places = self.indices.encode(indices, self.segments)
        rest = data.new_zeros(self.padding_bytes + CHECKSUM_BYTES)
        return add_checksum(torch.cat([places, data, rest]), key)

    def decode(
        self,
        message: Tensor,
        coordinates: Callable[[], Tensor],
        key: int,
        dtype: torch.dtype,
        work: Workspace,
    ) -> Entries:
        """Return the entries of a message. `coordinates` is called if indices are not sent."""
        if message.numel() != self.nbytes:
            nothing = message.new_empty(0)
            return nothing, nothing
        split = self.index_bytes
        places, data = message[:split], message[split : split + self.value_bytes]
        written = self.indices.written
        indices = self.indices.decode(places, self.segments) if written else coordinates()
        return indices, self.values.decode(data, Place(indices, self.segments, key, work), dtype)

    def inspect(
        self, messages: Sequence[Tensor], entries: Sequence[Entries], key: int, first: int
    ) -> Tensor:
        """Return whether each message passes each check of `REASONS`. The senders are the ranks
        from `first` on."""
        if not messages:
            return torch.empty(0, len(REASONS), dtype=torch.bool)
        if not self.indices.written:
            entries = [(indices[:0], values) for indices, values in entries]
        kernel = kernels.on(messages[0].device)
        return kernel.inspect(messages, entries, key, first, self.nbytes, self.segments.size)


@dataclass(frozen=True)
class ProposalLayout:
    """The layout of a message in which a rank proposes coordinates: indices and a checksum."""

    indices: IndexCodec
    segments: Segments

    @cached_property
    def nbytes(self) -> int:
        """The size of a message in bytes."""
        return bytes_with_checksum(self.indices.nbytes(self.segments))

    def blank(self, device: torch.device) -> Tensor:
        """Return memory for a message."""
        return torch.zeros(self.nbytes, dtype=torch.uint8, device=device)

    def pack(self, indices: Tensor, key: int) -> Tensor:
        """Return a message of these indices."""
        written = self.indices.encode(indices, self.segments)
        message = self.blank(indices.device)
        message[: written.numel()] = written
        return add_checksum(message, key)

    def read(self, messages: Sequence[Tensor], key: int, first: int) -> tuple[Tensor, Tensor]:
        """Return each message's indices, a row each, and whether each one is fine in each of
        `REASONS`; senders count from `first`."""
        nbytes = self.indices.nbytes(self.segments)
        rows = [self.indices.decode(message[:nbytes], self.segments) for message in messages]
        nothing = torch.empty(0, device=messages[0].device)
        found = kernels.on(messages[0].device).inspect(
            messages,
            [(indices, nothing) for indices in rows],
            key,
            first,
            self.nbytes,
            self.segments.size,
        )
        return torch.stack(rows), found


def of_one_length(
    indices: IndexCodec, values: ValueCodec, parts: Sequence[Segments]
) -> list[MessageLayout]:
    """Return a layout for each part, the shorter ones padded to the longest."""
    longest = max(MessageLayout(indices, values, part).nbytes for part in parts)
    return [MessageLayout(indices, values, part, longest) for part in parts]


def leave_out(unused: Sequence[ParamSlice], entries: Entries, segments: Segments) -> None:
    """Set the values of these parameters to zero."""
    indices, values = entries
    names = {param.name for param in unused}
    for param in segments.params:
        if param.name not in names:
            continue
        inside = (indices >= param.start) & (indices < param.stop)
        values[: indices.numel()][inside] = 0
        at = indices.numel()
        for start, stop in segments.dense_runs:
            low, high = max(start, param.start), min(stop, param.stop)
            if low < high:
                values[at + low - start : at + high - start] = 0
            at += stop - start
