"""How messages meet, so that every rank ends with the same mean.

A collective does no I/O: it is a generator that yields what it wants communicated (`Gather`,
`Deliver`, `Show`, `Reduce`) and is sent the answer. A driver in `groups/` carries the requests:
over the network, between simulated workers, or not at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from .errors import SchemeError
from .message import Context, sealed_bytes
from .notation import Part
from .shards import OWNED


@dataclass(frozen=True)
class Gather:
    """Give me every rank's payload: uint8, the same number of bytes on all ranks.

    The answer is a list of tensors in rank order.
    """

    payload: Tensor

    def traffic(self, world: int) -> int:
        """Bytes this rank sends, and as many that it receives."""
        return gather_traffic(self.payload.numel(), world)


@dataclass(frozen=True)
class Deliver:
    """Give row r of my payload to rank r: uint8, as many bytes in every row on all ranks.

    The answer is a list of the rows that all ranks had for me, in rank order.
    """

    payload: Tensor

    def traffic(self, world: int) -> int:
        """Bytes this rank sends, and as many that it receives."""
        return gather_traffic(self.payload.shape[1], world)


@dataclass(frozen=True)
class Show:
    """Give everybody what rank `root` has: uint8, as many bytes on all ranks.

    The answer is that rank's payload; those of the others only say how long it is.
    """

    payload: Tensor
    root: int

    def traffic(self, world: int) -> int:
        """Bytes a rank sends and receives, on average over all ranks."""
        return show_traffic(self.payload.numel(), world)


@dataclass(frozen=True)
class Reduce:
    """Give me the sum of all ranks' values, each times `scale`, added in rank order in `dtype`.

    Of every chunk, each rank adds up one share and then shows it to the others, so the bits do not
    depend on where a value lies in the message, as they do in a backend's ring all-reduce. Shares
    travel sealed by the context. The answer is a `Total`.
    """

    payload: Tensor
    dtype: torch.dtype
    context: Context
    scale: float = 1.0

    def traffic(self, world: int) -> int:
        """Bytes this rank sends, and as many that it receives."""
        return reduce_traffic(
            self.payload.numel(), self.payload.dtype.itemsize, self.dtype.itemsize, world
        )


@dataclass(frozen=True)
class Total:
    """A sum, and the damage code of the first share that arrived damaged, or `FINE`."""

    values: Tensor
    damage: Tensor


CHUNK = 1 << 21  # values: fewer keep more in the cache, and cost more for each round of messages

Request = Gather | Deliver | Show | Reduce
Talk = Generator[Request, Any, None]


def gather_traffic(nbytes: int, world: int) -> int:
    """Bytes each rank sends when every rank's message of `nbytes` reaches every other."""
    return (world - 1) * nbytes


def show_traffic(nbytes: int, world: int) -> int:
    """Bytes each rank sends, on average, when one rank's message of `nbytes` reaches all others.

    However it is passed on, every other rank receives it once.

    >>> show_traffic(1000, 4), show_traffic(1000, 1)
    (750, 0)
    """
    return -(-(world - 1) * nbytes // world)


def reduce_traffic(count: int, width: int, sum_width: int, world: int) -> int:
    """Bytes each rank sends to have `count` values of `width` bytes added up everywhere."""
    shares = [share_size(chunk, world) for chunk in chunk_sizes(count)]
    return (world - 1) * sum(
        sealed_bytes(share * width) + sealed_bytes(share * sum_width) for share in shares
    )


def chunk_sizes(count: int) -> list[int]:
    """How `count` values are cut to be added up, so that some travel while others are worked on.

    >>> chunk_sizes(5 * CHUNK // 2) == [CHUNK, CHUNK, CHUNK // 2]
    True
    """
    return [min(CHUNK, count - start) for start in range(0, max(count, 1), CHUNK)]


def share_size(count: int, world: int) -> int:
    """How many values of a chunk each rank adds up: equal shares, the last one padded."""
    return -(-count // world)


def ordered_sum(
    parts: Sequence[Tensor], dtype: torch.dtype, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """The sum of scaled parts in rank order, which fixes its bits; scaled first, as DDP does."""
    total = torch.mul(parts[0].to(dtype), scale, out=out)
    for part in parts[1:]:
        total += part.to(dtype) * scale
    return total


class Desk(Protocol):
    """What a collective needs from the exchange it works for."""

    share: float
    """1/W, to multiply by: dividing a tensor by W gives other bits on a GPU than on a CPU."""
    context: Context

    def write(self, indices: Tensor, values: Tensor) -> Tensor:
        """One rank's message."""

    def read(self, messages: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """All ranks' indices and values again, in rank order; damage is remembered."""

    def narrow(self, indices: Tensor, values: Tensor) -> Tensor:
        """One rank's values as the numbers that travel."""

    def check(self, total: Total) -> Tensor:
        """The sum; damage is remembered."""

    def apply(self, entries: Sequence[tuple[Tensor, Tensor]], share: float) -> None:
        """Write the sum of all entries, each times `share`, into the gradient."""


@runtime_checkable
class Owner(Protocol):
    """What `Sharded` needs from it."""

    def push(self, indices: Tensor, values: Tensor) -> Tensor:
        """One rank's messages to all owners, a row each."""

    def settle(self, messages: Sequence[Tensor]) -> Tensor:
        """As owner: the message that answers those of all ranks."""

    def pull(self, messages: Sequence[Tensor]) -> None:
        """Write what all owners answered into the gradient."""


class Sizes(Protocol):
    """What the traffic of an exchange depends on."""

    @property
    def message_bytes(self) -> int:
        """Bytes of a message with all that a rank sends."""

    @property
    def value_count(self) -> int:
        """Values in it."""

    @property
    def value_width(self) -> int:
        """Bytes of a value that travels to be added up."""

    @property
    def sum_width(self) -> int:
        """Bytes of a sum of values."""

    def push_bytes(self, world: int) -> int:
        """Bytes of one rank's message to one owner."""

    def pull_bytes(self, world: int) -> int:
        """Bytes of one owner's message to all."""


class Collective(Part, ABC):
    """Carries messages. `adds`: messages are added on the way, so ranks must share coordinates."""

    adds: ClassVar[bool]
    fields: ClassVar[tuple[str, ...]] = ()
    """What a rank remembers as the owner of some coordinates."""

    @abstractmethod
    def meet(self, indices: Tensor, values: Tensor, desk: Desk) -> Talk:
        """Exchange this rank's entries and hand the mean to `desk.add`."""

    @abstractmethod
    def traffic(self, sizes: Sizes, world: int) -> int:
        """Bytes each rank sends, as many as it receives."""


@dataclass(frozen=True, repr=False)
class AllGather(Collective):
    """Every rank receives every rank's message and adds them up itself, in rank order."""

    adds = False

    def meet(self, indices: Tensor, values: Tensor, desk: Desk) -> Talk:
        messages = yield Gather(desk.write(indices, values))
        desk.apply(desk.read(messages), desk.share)

    def traffic(self, sizes: Sizes, world: int) -> int:
        return gather_traffic(sizes.message_bytes, world)


@dataclass(frozen=True, repr=False)
class AllReduce(Collective):
    """Values at the same coordinates are added on the way, in rank order; no index travels."""

    adds = True

    def meet(self, indices: Tensor, values: Tensor, desk: Desk) -> Talk:
        narrow = desk.narrow(indices, values)
        mean = desk.check((yield Reduce(narrow, values.dtype, desk.context, desk.share)))
        desk.apply([(indices, mean)], 1.0)

    def traffic(self, sizes: Sizes, world: int) -> int:
        return reduce_traffic(sizes.value_count, sizes.value_width, sizes.sum_width, world)


@dataclass(frozen=True, repr=False)
class Sharded(Collective):
    """Every rank owns a share of the coordinates, as in a parameter server, sparse both ways.

    A rank sends each owner the entries that are its own. The owner adds them up, adds what it
    remembers, and sends everybody the largest of that; the rest it keeps for later. What a rank
    receives does not grow with the number of ranks.

    Arguments:
        pull_ratio: the share of its coordinates that an owner sends back; as many as a rank sends
            if not given, and 1.0 for all that arrived, which grows with the number of ranks.

    Reference: Aji & Heafield 2017, section 3.
    """

    pull_ratio: float | None = None

    adds = False
    fields = (OWNED,)

    def __post_init__(self) -> None:
        ratio = self.pull_ratio
        if ratio is None:
            return
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
            raise SchemeError(
                f"Sharded(pull_ratio={ratio!r}) makes no sense: it is the share of its coordinates "
                f"that an owner sends back, above 0 and at most 1, as in Sharded(pull_ratio=0.01)"
            )
        object.__setattr__(self, "pull_ratio", float(ratio))

    def meet(self, indices: Tensor, values: Tensor, desk: Desk) -> Talk:
        assert isinstance(desk, Owner)
        parts = yield Deliver(desk.push(indices, values))
        results = yield Gather(desk.settle(parts))
        desk.pull(results)

    def traffic(self, sizes: Sizes, world: int) -> int:
        return gather_traffic(sizes.push_bytes(world), world) + gather_traffic(
            sizes.pull_bytes(world), world
        )


ALL: tuple[type[Collective], ...] = (AllGather, AllReduce, Sharded)
