"""Sums that are made chunk by chunk: the same bits, the bytes foretold, and every damage found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sparsewire as sw
from sparsewire import sums
from sparsewire.counters import Counters
from sparsewire.groups import drive
from sparsewire.groups.distributed import DistributedGroup
from sparsewire.groups.transport import Work
from sparsewire.message import FINE, Context, bytes_with_checksum, corruption_code
from sparsewire.sums import IN_FLIGHT, Total, ordered_sum, reduce_traffic, sum_over_ranks
from sparsewire.workspace import Workspace

from ..cluster import Cluster
from ..patience import patience, telling, wait_for

Fresh = Callable[[int], Cluster]

CHUNK = 30  # values, so that small sums are cut into many chunks, of shares of 8, 8, 8 and 6
COUNTS = [0, 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 7 * CHUNK + 5]
CONTEXT = Context(step=3, bucket=1, scheme=5, layout=7)


@contextmanager
def small_chunks() -> Iterator[None]:
    kept, sums.CHUNK = sums.CHUNK, CHUNK
    try:
        yield
    finally:
        sums.CHUNK = kept


def payload(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def add_up(
    group: DistributedGroup,
    count: int,
    dtype: torch.dtype = torch.float32,
    counters: Counters | None = None,
    work: Workspace | None = None,
) -> Total:
    """A third of the sum of all ranks' payloads."""
    values, work = payload(group.rank, count, dtype), work or Workspace()
    routine = sum_over_ranks(values, torch.float32, CONTEXT, group.rank, group.size, work, 1 / 3)
    return drive(routine, group, counters or Counters())


@dataclass
class Tap:
    """Sits between a group and its backend: counts bytes, and may change what has arrived.

    `tamper(leg, chunk, rows)` is called with leg 0 or 1, and all that arrived so far in that leg.
    """

    group: DistributedGroup
    tamper: Callable[[int, int, list[Tensor]], None] = lambda *_: None
    sent: int = 0
    arrived: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))

    def __enter__(self) -> Tap:
        transport = self.group._transport
        self._gather, self._scatter = transport.gather, transport.deliver
        transport.gather, transport.deliver = self._gathered, self._scattered
        return self

    def __exit__(self, *_: object) -> None:
        transport = self.group._transport
        transport.gather, transport.deliver = self._gather, self._scatter

    def _gathered(self, output: Tensor, given: Tensor) -> Work:
        self.sent += (self.group.size - 1) * given.numel()
        return self._after(self._gather(output, given), 1, output.view(self.group.size, -1))

    def _scattered(self, output: Tensor, given: Tensor) -> Work:
        self.sent += (self.group.size - 1) * given[0].numel()
        return self._after(self._scatter(output, given), 0, output)

    def _after(self, work: Work, leg: int, rows: Tensor) -> Work:
        work.wait()
        whole = rows.clone()
        self.tamper(leg, len(self.arrived[leg]), [*self.arrived[leg], rows])
        self.arrived[leg].append(whole)
        return work


def _sum(count: int, dtype: torch.dtype) -> tuple[Tensor, int, int, int, int]:
    with small_chunks():
        group = DistributedGroup()
        counters = Counters()
        with Tap(group) as tap:
            total = add_up(group, count, dtype, counters)
        group.close()
        assert tap.sent == counters.bytes_sent
        foretold = reduce_traffic(count, dtype.itemsize, 4, group.size)
        return total.values, int(total.corruption), tap.sent, foretold, len(tap.arrived[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_chunks_change_no_bit_and_cost_what_was_foretold(
    four: Cluster, count: int, dtype: torch.dtype
) -> None:
    parts = [payload(rank, count, dtype) for rank in range(4)]
    expected = ordered_sum(parts, torch.float32, 1 / 3)
    for values, corruption, sent, foretold, chunks in four.run(_sum, count, dtype):
        assert torch.equal(values, expected)
        assert corruption == FINE
        assert sent == foretold
        assert chunks == max(1, -(-count // CHUNK))


def _damaged(tamper: Callable[[int, int, list[Tensor]], None]) -> int:
    with small_chunks():
        group = DistributedGroup()
        nothing = Tap.tamper
        with Tap(group, tamper if dist.get_rank() == 1 else nothing) as tap:
            total = add_up(group, 5 * CHUNK)
        assert len(tap.arrived[0]) == len(tap.arrived[1]) == 5
        group.close()
        return int(total.corruption)


@dataclass
class Flip:
    """Flips one bit of what a sender sent in one leg of a chunk, or of several."""

    places: list[tuple[int, int, int]]  # leg, chunk, sender

    def __call__(self, leg: int, chunk: int, rows: list[Tensor]) -> None:
        for sender in range(4):
            if (leg, chunk, sender) in self.places:
                rows[-1][sender, 9] ^= 16


@pytest.mark.parametrize("leg", [0, 1])
@pytest.mark.parametrize("chunk", range(5))
def test_damage_in_any_chunk_is_found(four: Cluster, leg: int, chunk: int) -> None:
    found = four.run(_damaged, Flip([(leg, chunk, 2)]))
    assert found == [FINE, corruption_code(2, 0), FINE, FINE]


def test_of_several_damaged_shares_that_of_the_lowest_rank_is_named(four: Cluster) -> None:
    found = four.run(_damaged, Flip([(0, 0, 3), (0, 4, 2), (1, 3, 0)]))
    assert found[1] == corruption_code(0, 0)


@dataclass
class Repeat:
    """Gives out an earlier chunk of one sender's once more, in the place of a later one."""

    leg: int
    earlier: int
    later: int

    def __call__(self, leg: int, chunk: int, rows: list[Tensor]) -> None:
        if (leg, chunk) == (self.leg, self.later):
            rows[chunk][3] = rows[self.earlier][3]


@pytest.mark.parametrize("leg", [0, 1])
@pytest.mark.parametrize(("earlier", "later"), [(0, 1), (1, 4), (3, 4)])
def test_a_chunk_in_the_place_of_another_is_damage(
    four: Cluster, leg: int, earlier: int, later: int
) -> None:
    assert four.run(_damaged, Repeat(leg, earlier, later))[1] == corruption_code(3, 0)


def _buffers(count: int) -> tuple[int, bool]:
    with small_chunks():
        group, work = DistributedGroup(), Workspace()
        add_up(group, count, work=work)
        first = {name: buffer.data_ptr() for name, buffer in work.buffers.items()}
        add_up(group, count, work=work)
        again = {name: buffer.data_ptr() for name, buffer in work.buffers.items()}
        nbytes = sum(buffer.numel() for buffer in work.buffers.values())
        group.close()
        return nbytes, first == again


def test_buffers_are_kept_and_hold_the_sum_and_the_chunks_under_way(four: Cluster) -> None:
    chunks = 100
    share = bytes_with_checksum(4 * 8)
    under_way = IN_FLIGHT * (4 + 4) * share  # sent and received
    expected = 4 * chunks * CHUNK + chunks * share + under_way
    assert four.run(_buffers, chunks * CHUNK) == [(expected, True)] * 4


def _left_alone(deadline: float, over: Path) -> tuple[str, int]:
    """Rank 1 takes part in the first chunk, and then no more."""
    with small_chunks():
        group, work = DistributedGroup(timeout=deadline), Workspace()
        add_up(group, CHUNK, work=work)
        if dist.get_rank() == 1:
            wait_for(over.exists)
            return "", 0
        with telling(over), pytest.raises(sw.errors.ExchangeError) as error:
            add_up(group, 5 * CHUNK, work=work)
        return str(error.value), len(work.buffers)


def test_chunks_that_nobody_takes_end_in_time_and_let_go_of_their_buffers(
    fresh: Fresh, tmp_path: Path
) -> None:
    (message, buffers), _ = fresh(2).run(_left_alone, patience(2), tmp_path / "over")
    assert "failed on rank 0 of 2" in message
    assert buffers == 0
