"""Sums over all ranks in rank order, so that all ranks hold the same bits.

Every rank sums one share of the values and then sends the result to all others. Unlike in a
backend's ring all-reduce, the bits do not depend on the position of a value in the message. Shares
have checksums. Large sums are divided into chunks, so that some are sent while another is summed.
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

CHUNK = 1 << 21  # values; smaller chunks fit into the cache, but need more messages
IN_FLIGHT = 3  # requests of a sum that are under way at the same time
Leg = Generator[Request, Any, None]  # one request, and what is done with the answer


@dataclass(frozen=True)
class Total:
    """A sum, and the corruption code of the first share that arrived corrupt, or `FINE`."""

    values: Tensor
    corruption: Tensor


def reduce_traffic(count: int, width: int, sum_width: int, world_size: int) -> int:
    """Return the bytes that each rank sends to sum `count` values of `width` bytes."""
    shares = [share_size(chunk, world_size) for chunk in chunk_sizes(count)]
    return (world_size - 1) * sum(
        bytes_with_checksum(share * width) + bytes_with_checksum(share * sum_width)
        for share in shares
    )


def chunk_sizes(count: int) -> list[int]:
    """Return the sizes of the chunks of a sum of `count` values.

    >>> chunk_sizes(5 * CHUNK // 2) == [CHUNK, CHUNK, CHUNK // 2]
    True
    """
    return [min(CHUNK, count - start) for start in range(0, max(count, 1), CHUNK)]


def share_size(count: int, world_size: int) -> int:
    """Return how many values of a chunk each rank sums: equal shares, the last one padded."""
    return -(-count // world_size)


def ordered_sum(
    parts: Sequence[Tensor], dtype: torch.dtype, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """Return the sum of scaled parts in rank order. They are scaled first, as DDP does."""
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

    `context` keys the checksums. The sum is written into `out`, which may be the values themselves,
    or else into the workspace: use it before the next sum.
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
        # not chunk by chunk: two kinds of traffic at the same time slow each other down
        legs = [
            *(self._add_up(chunk, part, next(slots)) for chunk, part in enumerate(parts)),
            *(self._spread(chunk, goal, next(slots)) for chunk, goal in enumerate(goals)),
        ]
        yield from _overlap(legs, at_once=min(IN_FLIGHT, len(sizes)))

    def _add_up(self, chunk: int, part: Tensor, slot: int) -> Leg:
        """Send every rank its share of a chunk, and sum this rank's share."""
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
        """Send all ranks the sum of this rank's share, and write theirs into `goal`."""
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
        """Return the values that each rank sums. The last ranks may have fewer, or none."""
        share = share_size(chunk.numel(), self.world_size)
        return [chunk[rank * share : (rank + 1) * share] for rank in range(self.world_size)]

    def _rows(self, name: str, share: int, dtype: torch.dtype) -> Tensor:
        """Return memory for one share with a checksum from or for every rank."""
        width = bytes_with_checksum(share * dtype.itemsize)
        return self._buffer(name, self.world_size * width).view(self.world_size, width)

    def _buffer(self, name: str, nbytes: int) -> Tensor:
        return self.work.buffer(name, nbytes, self.values.device)

    def _are_sealed(self, rows: Sequence[Tensor], keys: Sequence[int]) -> Tensor:
        """Return whether each rank's share is as it was sent; this rank's own was not sent."""
        own = torch.ones((), dtype=torch.bool, device=rows[0].device)
        return torch.stack(
            [
                own if rank == self.rank else matches_checksum(row, key)
                for rank, (row, key) in enumerate(zip(rows, keys, strict=True))
            ]
        )


def _overlap(legs: Iterable[Leg], at_once: int) -> Routine[None]:
    """Run legs so that some are in transit while another is processed, in the same order on all
    ranks."""
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
