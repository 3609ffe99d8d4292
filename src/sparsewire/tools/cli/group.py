"""Where workers meet: the store, the process group, and the step at which all of them stop.

The only file of the command line that uses `torch.distributed`.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from .errors import CommandError

_STRIDE = 5  # steps between two looks at the store, so that a look costs next to nothing
_PREFIX = "sparsewire/cli"
_ASKED = "stop/asked"
_MEETING = 120.0  # seconds for all processes to start and import torch


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
    # The store takes the bound socket over: nobody can take the port in between.
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def ask_to_stop(store: Store) -> None:
    """Ask the group to stop soon; rank 0 decides at which step."""
    PrefixStore(_PREFIX, store).set(_ASKED, "1")


class Group:
    """This process's place among the workers."""

    def __init__(self, store: Store, rank: int, workers: int, timeout: float) -> None:
        self.rank = rank
        self.workers = workers
        self.store = PrefixStore(_PREFIX, store)
        # An exchange gives up first, with a better message than the group's own time-out.
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=workers,
            timeout=timedelta(seconds=2 * timeout + 10),
        )

    @classmethod
    def launched(cls, rank: int, workers: int, address: str, port: int, timeout: float) -> Group:
        """Join the group whose store a parent process hosts."""
        meeting = timedelta(seconds=_MEETING)
        store = TCPStore(address, port, is_master=False, timeout=meeting)
        return cls(store, rank, workers, timeout)

    @classmethod
    def from_environment(cls, timeout: float) -> Group:
        """Join the group that torchrun describes in the environment."""
        meeting = timedelta(seconds=_MEETING)
        store, rank, workers = next(iter(rendezvous("env://", timeout=meeting)))
        return cls(store, rank, workers, timeout)

    def sum(self, *values: float) -> list[float]:
        """Add each value over all ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(value) for value in total]

    def collect(self, key: str, text: str) -> list[str]:
        """Give `text` to rank 0, which gets those of all ranks; the others get nothing."""
        self.store.set(f"{key}/{self.rank}", text)
        if self.rank:
            return []
        return [self.store.get(f"{key}/{rank}").decode() for rank in range(self.workers)]

    def leave(self) -> None:
        """Leave in peace: nobody closes its connections while another still needs them."""
        if self.store.add("leaving", 1) == self.workers:
            self.store.set("left", "1")
        self.store.wait(["left"])
        dist.destroy_process_group()


class StopSign:
    """How all ranks come to stop after the same step.

    Every exchange waits for all ranks, so they are never more than one step apart. Anyone may
    ask to stop; rank 0 then publishes a step so far ahead that every rank still looks before
    it gets there.
    """

    def __init__(self, group: Group, run: int) -> None:
        self.asked = False  # set by a signal handler
        self._group = group
        self._key = f"stop/at/{run}"

    def reached(self, step: int) -> bool:
        """Whether to stop after `step` steps; to be asked before each of them is begun."""
        if step % _STRIDE:
            return False
        store = self._group.store
        if self.asked:
            store.set(_ASKED, "1")
        if not store.check([_ASKED]):
            return False
        if self._group.rank == 0 and not store.check([self._key]):
            store.set(self._key, str(step + _STRIDE))
        return store.check([self._key]) and step >= int(store.get(self._key))
