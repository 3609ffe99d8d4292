"""The collectives of a backend: the best one for each purpose, begun without waiting."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work as BackendWork

ONE_HOP = 1 << 22  # bytes from all ranks that are gathered in one hop; more are gathered in a ring
SLICE = datetime.timedelta(seconds=0.1)  # of waiting, after which to check whether to continue


def gather_hops(nbytes: int, size: int) -> int:
    """Return how often a rank waits for another on Gloo to get `nbytes` from each of `size` ranks.

    >>> gather_hops(1000, 8), gather_hops(1_000_000, 8)
    (1, 7)
    """
    return 1 if nbytes * size <= ONE_HOP else size - 1


class Work(Protocol):
    """An operation that is under way."""

    def wait(self) -> object:
        """Wait until it ends."""


class LimitedWork(Protocol):
    """An operation under way on a CPU, on which one can wait with a limit."""

    def wait(self, timeout: datetime.timedelta = ..., /) -> object:
        """Wait until it ends. Raise RuntimeError if it fails, or after the limit."""

    def is_completed(self) -> bool:
        """Return whether it has ended, successfully or not."""


def wait_in_slices(work: LimitedWork, is_given_up: Callable[[], bool]) -> bool:
    """Wait until an operation ends or is given up. Return whether it has ended."""
    while not is_given_up():
        try:
            work.wait(SLICE)
            return True
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises the error again, unless it has just succeeded
                return True
    return False


@dataclass(frozen=True)
class _All:
    """Several operations under way."""

    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Transport:
    """Carries bytes between the ranks of a process group, from and into tensors on `device`.

    If the backend does not support an operation, its replacement is chosen when the transport is
    made.

    Arguments:
        group: The process group.
        device: Where messages lie.
        is_given_up: Returns True once no thread waits for the transport any more.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._group = group
        self._is_given_up = is_given_up
        # Gloo's all-gather wakes every rank up for each of W − 1 hops, which costs more than bytes
        self._is_gloo = "gloo" in str(dist.get_backend_config(group)) and device.type == "cpu"
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        probe = torch.zeros(self._size, 1, dtype=torch.uint8, device=device)
        # the name changed from all_gather_into_tensor to all_gather_single in torch 2.13
        self._single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._gather = self._first_of(
            (self._into_one, self._into_list), probe.new_empty(self._size), probe[0]
        )
        self._deliver = self._first_of(
            (self._at_once, self._in_pairs), torch.empty_like(probe), probe
        )

    def _first_of(
        self,
        ways: tuple[Callable[[Tensor, Tensor], Work], Callable[[Tensor, Tensor], Work]],
        output: Tensor,
        probe: Tensor,
    ) -> Callable[[Tensor, Tensor], Work]:
        best, other = ways
        try:
            if not self.wait(best(output, probe), self._is_given_up):
                raise RuntimeError("nobody waits for this connection any more")
        except (RuntimeError, NotImplementedError) as error:
            if "support" not in str(error).lower():
                raise
            return other
        return best

    def gather(self, output: Tensor, payload: Tensor) -> Work:
        """Begin to gather every rank's payload into `output`, in rank order."""
        if self._is_gloo and gather_hops(payload.nbytes, self._size) == 1:
            return self._deliver(output.view(self._size, -1), payload.repeat(self._size, 1))
        return self._gather(output, payload)

    def deliver(self, output: Tensor, rows: Tensor) -> Work:
        """Begin an all-to-all: row r goes to rank r, and this rank's rows arrive in `output`."""
        return self._deliver(output, rows)

    def show(self, payload: Tensor, root: int) -> Work:
        """Begin to broadcast the payload of rank `root` into the payloads of all ranks."""
        source = dist.get_global_rank(self._group, root)
        work: Work = dist.broadcast(payload, source, group=self._group, async_op=True)
        return work

    def wait(self, work: Work, is_given_up: Callable[[], bool]) -> bool:
        """Wait until an operation ends or is given up. Return whether it has ended.

        A thread that is still inside Gloo when the interpreter exits would abort the process.
        """
        works = work.works if isinstance(work, _All) else [work]
        limited = [each for each in works if isinstance(each, BackendWork)]
        if self._is_gloo and len(limited) == len(works):
            return all(wait_in_slices(each, is_given_up) for each in limited)
        work.wait()  # on a GPU this makes the stream wait, not the thread
        return True

    def _into_one(self, output: Tensor, payload: Tensor) -> Work:
        work: Work = self._single(output, payload, group=self._group, async_op=True)
        return work

    def _into_list(self, output: Tensor, payload: Tensor) -> Work:
        rows = list(output.view(self._size, -1))
        work: Work = dist.all_gather(rows, payload, group=self._group, async_op=True)
        return work

    def _at_once(self, output: Tensor, rows: Tensor) -> Work:
        work: Work = dist.all_to_all_single(output, rows, group=self._group, async_op=True)
        return work

    def _in_pairs(self, output: Tensor, rows: Tensor) -> Work:
        output[self._rank] = rows[self._rank]
        pairs = [
            dist.P2POp(operation, side[rank], group=self._group, group_peer=rank)
            for rank in range(self._size)
            if rank != self._rank
            for operation, side in ((dist.isend, rows), (dist.irecv, output))
        ]
        return _All(dist.batch_isend_irecv(pairs))
