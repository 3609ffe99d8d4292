"""Sums over all ranks, made in rank order, so that all ranks hold the same bits.

Every rank adds up one share of the values and then gives the sum to all others. The bits do not
depend on where a value lies in the message, as they do in a backend's ring all-reduce. Shares carry
checksums. Large sums are cut into chunks, some of which travel while another is added up.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .message import (
    FINE,
    Context,
    add_checksum,
    bytes_with_checksum,
    first_mismatch,
    matches_checksum,
)
from .requests import GroupName, Request, Routine, Start, Wait, all_gather, all_to_all
from .workspace import Workspace

CHUNK = 1 << 21  # values: fewer keep more in the cache, and cost more for each round of messages
IN_FLIGHT = 3  # requests of a sum that are under way at the same time
Leg = Generator[Request, Any, None]  # one request, and what is done with the answer


@dataclass(frozen=True)
class Total:
    """A sum, and the corruption code of the first share that arrived corrupt, or `FINE`."""

    values: Tensor
    corruption: Tensor


def reduce_traffic(count: int, width: int, sum_width: int, world_size: int) -> int:
    """Bytes each rank sends to have `count` values of `width` bytes added up everywhere."""
    shares = [share_size(chunk, world_size) for chunk in chunk_sizes(count)]
    return (world_size - 1) * sum(
        bytes_with_checksum(share * width) + bytes_with_checksum(share * sum_width)
        for share in shares
    )


def chunk_sizes(count: int) -> list[int]:
    """How `count` values are cut to be added up, so that some travel while others are worked on.

    >>> chunk_sizes(5 * CHUNK // 2) == [CHUNK, CHUNK, CHUNK // 2]
    True
    """
    return [min(CHUNK, count - start) for start in range(0, max(count, 1), CHUNK)]


def share_size(count: int, world_size: int) -> int:
    """How many values of a chunk each rank adds up: equal shares, the last one padded."""
    return -(-count // world_size)


def ordered_sum(
    parts: Sequence[Tensor], dtype: torch.dtype, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """The sum of scaled parts in rank order, which fixes its bits; scaled first, as DDP does."""
    total = torch.mul(parts[0].to(dtype), scale, out=out)
    for part in parts[1:]:
        total += part.to(dtype) * scale
    return total


def sum_over_ranks(
    values: Tensor,
    dtype: torch.dtype,
    context: Context,
    rank: int,
    world_size: int,
    work: Workspace,
    scale: float = 1.0,
    group: GroupName = "exchange",
    out: Tensor | None = None,
) -> Routine[Total]:
    """Return the sum of all ranks' values, each times `scale`, added in rank order in `dtype`.

    `context` keys the checksums. The sum lies in `out`, which may be the values themselves, or else
    in the workspace: use it before the next one.
    """
    if world_size == 1:
        fine = torch.full((), FINE, device=values.device)
        return Total(ordered_sum([values], dtype, scale), fine)
    summation = _Summation(values, dtype, context, rank, world_size, work, scale, group, out)
    try:
        yield from summation.run()
    except BaseException:
        work.clear()
        raise
    return Total(summation.total, first_mismatch(torch.stack(summation.matches).all(0)))


@dataclass
class _Summation:
    """One sum, seen from one rank."""

    values: Tensor
    dtype: torch.dtype
    context: Context
    rank: int
    world_size: int
    work: Workspace
    scale: float
    group: GroupName
    out: Tensor | None

    def __post_init__(self) -> None:
        nbytes = self.values.numel() * self.dtype.itemsize
        out = self._buffer("total", nbytes).view(self.dtype) if self.out is None else self.out
        self.total = out  # written to when all values have been read
        self.matches: list[Tensor] = []  # by leg: whether each rank's share is as it was sent

    def run(self) -> Routine[None]:
        sizes = chunk_sizes(self.values.numel())
        parts, goals = torch.split(self.values, sizes), torch.split(self.total, sizes)
        slots = itertools.cycle(range(IN_FLIGHT))
        # not chunk by chunk: two kinds of traffic at once get in each other's way
        legs = [
            *(self._add_up(chunk, part, next(slots)) for chunk, part in enumerate(parts)),
            *(self._spread(chunk, goal, next(slots)) for chunk, goal in enumerate(goals)),
        ]
        yield from _overlap(legs, at_once=min(IN_FLIGHT, len(sizes)))

    def _add_up(self, chunk: int, part: Tensor, slot: int) -> Leg:
        """Give every rank its share of a chunk, and add up this rank's."""
        keys, share = self._keys(chunk), share_size(part.numel(), self.world_size)
        sent = self._rows(f"sent {slot}", share, part.dtype)
        for rank, (row, values) in enumerate(zip(sent, self._shares(part), strict=True)):
            row[: values.nbytes] = values.view(torch.uint8)
            row[values.nbytes :] = 0
            if rank != self.rank:
                add_checksum(row, keys[self.rank])
        # as bytes, since not every backend carries every float type
        rows = self._rows(f"received {slot}", share, part.dtype)
        received = yield all_to_all(sent, rows, self.group)
        self.matches.append(self._are_sealed(received, keys))
        shares = [row[: share * part.dtype.itemsize].view(part.dtype) for row in received]
        end = share * self.dtype.itemsize
        own = self._buffer(f"sum {chunk}", bytes_with_checksum(end))
        ordered_sum(shares, self.dtype, self.scale, out=own[:end].view(self.dtype))
        own[end:] = 0
        add_checksum(own, keys[self.rank])

    def _spread(self, chunk: int, goal: Tensor, slot: int) -> Leg:
        """Give all ranks the sum of this rank's share of a chunk, and write theirs into `goal`."""
        share = share_size(goal.numel(), self.world_size)
        own = self._buffer(f"sum {chunk}", bytes_with_checksum(share * self.dtype.itemsize))
        rows = self._rows(f"received {slot}", share, self.dtype)
        shown = yield all_gather(own, rows, self.group)
        self.matches.append(self._are_sealed(shown, self._keys(chunk)))
        for row, values in zip(shown, self._shares(goal), strict=True):
            values.copy_(row[: values.nbytes].view(goal.dtype))

    def _keys(self, chunk: int) -> list[int]:
        context = replace(self.context, chunk=chunk)
        return [context.key(rank) for rank in range(self.world_size)]

    def _shares(self, chunk: Tensor) -> list[Tensor]:
        """The values of a chunk that each rank adds up; the last ranks may have fewer, or none."""
        share = share_size(chunk.numel(), self.world_size)
        return [chunk[rank * share : (rank + 1) * share] for rank in range(self.world_size)]

    def _rows(self, name: str, share: int, dtype: torch.dtype) -> Tensor:
        """Memory for one sealed share from or for every rank."""
        width = bytes_with_checksum(share * dtype.itemsize)
        return self._buffer(name, self.world_size * width).view(self.world_size, width)

    def _buffer(self, name: str, nbytes: int) -> Tensor:
        return self.work.buffer(name, nbytes, self.values.device)

    def _are_sealed(self, rows: Sequence[Tensor], keys: Sequence[int]) -> Tensor:
        """Whether each rank's share is as it was sent; this rank's own never left."""
        own = torch.ones((), dtype=torch.bool, device=rows[0].device)
        return torch.stack(
            [
                own if rank == self.rank else matches_checksum(row, key)
                for rank, (row, key) in enumerate(zip(rows, keys, strict=True))
            ]
        )


def _overlap(legs: Iterable[Leg], at_once: int) -> Routine[None]:
    """Let some legs travel while another is worked on, in the same order on all ranks."""
    under_way: deque[tuple[Leg, Any]] = deque()
    for leg in legs:
        under_way.append((leg, (yield Start(next(leg)))))
        if len(under_way) == at_once:
            yield from _finish(*under_way.popleft())
    for leg, ticket in under_way:
        yield from _finish(leg, ticket)


def _finish(leg: Leg, ticket: Any) -> Routine[None]:
    answer = yield Wait(ticket)
    with contextlib.suppress(StopIteration):
        leg.send(answer)
