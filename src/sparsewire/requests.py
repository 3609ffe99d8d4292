"""Requests: the communication that an exchange asks its driver for.

An exchange is a routine: a generator that yields requests and receives the answers. It contains no
network, thread or clock, so that the same routine runs over `torch.distributed`, between simulated
workers, or in a test that corrupts messages.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor

T = TypeVar("T")
GroupName = Literal["exchange", "status", "intra_node", "everyone"]


@dataclass(frozen=True)
class Request:
    """One collective operation. All ranks request the same, with payloads of the same shape.

    Arguments:
        op: `'all_gather'`: every rank gets all ranks' payloads, as a list in rank order.
            `'all_to_all'`: row r of the payload goes to rank r, and every rank gets the rows that
            all ranks have for it, as a list in rank order. `'broadcast'`: every rank gets the
            payload of rank `root`; the payloads of the others only give its size.
        payload: A uint8 tensor, flat except for `'all_to_all'`.
        group: The ranks that take part: those that `'exchange'` gradients, those that compare their
            `'status'` after a step, those of one machine (`'intra_node'`), or `'everyone'`.
        root: The rank that broadcasts.
        out: Memory with one row for each rank, in which the driver may store what it receives.
    """

    op: Literal["all_gather", "all_to_all", "broadcast"]
    payload: Tensor
    group: GroupName = "exchange"
    root: int = 0
    out: Tensor | None = None

    @property
    def is_counted(self) -> bool:
        """Whether its bytes count for a step; those inside a machine and of audits do not."""
        return self.group in ("exchange", "status")

    def traffic(self, world_size: int) -> int:
        """Return the bytes that a rank sends and receives; for a broadcast, on average."""
        nbytes = self.payload.nbytes
        if self.op == "all_to_all":
            return gather_traffic(nbytes // world_size, world_size)
        if self.op == "all_gather":
            return gather_traffic(nbytes, world_size)
        return broadcast_traffic(nbytes, world_size)


@dataclass(frozen=True)
class Start:
    """Begin a request without waiting for it. The result is a ticket for `Wait`."""

    request: Request


@dataclass(frozen=True)
class Wait:
    """Wait for a request that was started. The result is the answer to the request."""

    ticket: Any


Step = Request | Start | Wait
Routine = Generator[Step, Any, T]


def all_gather(
    payload: Tensor, out: Tensor | None = None, group: GroupName = "exchange"
) -> Request:
    """Give every rank all ranks' payloads."""
    return Request("all_gather", payload, group, out=out)


def all_to_all(rows: Tensor, out: Tensor | None = None, group: GroupName = "exchange") -> Request:
    """Give rank r row r."""
    return Request("all_to_all", rows, group, out=out)


def broadcast(payload: Tensor, root: int, group: GroupName = "exchange") -> Request:
    """Give every rank the payload of `root`."""
    return Request("broadcast", payload, group, root)


def gather_traffic(nbytes: int, world_size: int) -> int:
    """Return the bytes each rank sends when its message of `nbytes` reaches every other rank."""
    return (world_size - 1) * nbytes


def broadcast_traffic(nbytes: int, world_size: int) -> int:
    """Return the bytes each rank sends, on average, when one rank's message reaches all others.

    However it is passed on, every other rank receives it once.

    >>> broadcast_traffic(1000, 4), broadcast_traffic(1000, 1)
    (750, 0)
    """
    return -(-(world_size - 1) * nbytes // world_size)
