"""How workers meet and stop: the store, the process group, and a common last step."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.rendezvous import rendezvous

from ..lab import cores
from .errors import CommandError

_STRIDE = 5  # steps between two checks of the store, which keeps their cost negligible
_ASKED = "stop/asked"
_MEETING = timedelta(seconds=120)  # for all processes to start and import torch


def host_store(address: str, port: int | None) -> TCPStore:
    """Host the store of a new group at an address of this machine, at `port` or at a free one."""
    listener = socket.socket()
    # Without this, a port stays busy for a minute after the run before.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port or 0))
        listener.listen()
    except OSError as error:
        listener.close()
        raise CommandError(
            f"port {port} cannot be used ({error.strerror}): "
            "choose another --port, or leave it out to take a free one"
        ) from None
    # The store takes over the bound socket, so no other process can take the port in between.
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class Group:
    """This process's place among the workers, as the launcher or torchrun describes it in the
    environment; the default process group for as long as it lasts."""

    def __init__(self, timeout: float) -> None:
        store, self.rank, self.workers = next(iter(rendezvous("env://", timeout=_MEETING)))
        self.store = PrefixStore("sparsewire/cli", store)
        # An exchange gives up first, with a better message than the group's own time-out.
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.rank,
            world_size=self.workers,
            timeout=timedelta(seconds=2 * timeout + 10),
        )
        torch.set_num_threads(max(1, cores() // self.workers))

    def sum(self, *values: float) -> list[float]:
        """Add each value over all ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, value: float) -> float:
        """The largest of all ranks' values."""
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, operation)
        return [float(value) for value in total]

    def leave(self) -> None:
        """Leave the group once all ranks are done, since connections are needed until then."""
        if self.store.add("leaving", 1) == self.workers:
            self.store.set("left", "1")
        self.store.wait(["left"])
        dist.destroy_process_group()


class StopSign:
    """Makes all ranks stop after the same step once one of them got a signal.

    Every exchange waits for all ranks, so they are never more than one step apart. Any of them may
    ask to stop; rank 0 then publishes a step so far ahead that every rank still looks before it
    gets there.
    """

    def __init__(self, group: Group) -> None:
        self._asked = False
        self._group = group
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def reached(self, run: int, step: int) -> bool:
        """Whether to stop after `step` steps of a run; to be asked before each is begun."""
        if step % _STRIDE:
            return False
        store, key = self._group.store, f"stop/at/{run}"
        if self._asked:
            store.set(_ASKED, "1")
        if not store.check([_ASKED]):
            return False
        if self._group.rank == 0 and not store.check([key]):
            store.set(key, str(step + _STRIDE))
        return store.check([key]) and step >= int(store.get(key))
