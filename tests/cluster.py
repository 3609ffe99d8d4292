"""Real processes with a real Gloo group, kept for many tests, and forked from one that is warm.

    results = cluster.run(function, *arguments)     # function(*arguments) on every rank

Functions and arguments travel by pickle, so functions live at the top level of a test module.
"""

from __future__ import annotations

import datetime
import multiprocessing as mp
import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from .patience import patience


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


Host = Literal["test", "agent", "rank 0"]


def _serve(
    rank: int, size: int, port: int, hosts_store: bool, limit: float, pipe: Connection
) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=hosts_store, wait_for_workers=False)
    timeout = datetime.timedelta(seconds=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    while (task := pipe.recv()) is not None:
        function, arguments = task
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    os._exit(0)


def _host_store(pipe: Connection) -> None:
    """What torchrun's agent does for its workers."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def _free_port() -> int:
    with socket.socket() as selection:
        selection.bind(("127.0.0.1", 0))
        port: int = selection.getsockname()[1]
        return port


class Cluster:
    """`size` worker processes. The store lives in the test's process, in a process of its own (the
    `agent`), or on rank 0."""

    def __init__(self, size: int, host: Host = "test") -> None:
        import torch.distributed as dist

        self.size = size
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.warm"])
        self.agent: BaseProcess | None = None
        if host == "test":
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        elif host == "agent":
            self._agent_pipe, there = context.Pipe()
            self.agent = context.Process(target=_host_store, args=(there,), daemon=True)
            self.agent.start()
            port = self._agent_pipe.recv()
        else:
            port = _free_port()
        self.processes, self._pipes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, size, port, host == "rank 0" and rank == 0, patience(60), there),
                daemon=True,
            )
            process.start()
            there.close()
            self.processes.append(process)
            self._pipes.append(here)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call the function on every rank; any rank's error or silence fails the test."""
        outcomes = self.outcomes(function, *arguments)
        failures = [
            f"rank {rank}: {value}" for rank, (fine, value) in enumerate(outcomes) if not fine
        ]
        if failures:
            self.stop()
            raise RankError("\n".join(failures))
        return [value for _, value in outcomes]

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call the function on every rank without waiting for the answers."""
        for pipe in self._pipes:
            pipe.send((function, arguments))

    def outcomes(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[bool, Any]]:
        """(True, result) or (False, traceback) of every rank."""
        self.start(function, *arguments)
        return self.collect()

    def collect(self) -> list[tuple[bool, Any]]:
        """What the ranks answer to the last call; a rank that died gives (False, 'died')."""
        return [self.collect_one(rank) for rank in range(self.size)]

    def collect_one(self, rank: int) -> tuple[bool, Any]:
        """What one rank answers to the last call; no answer within the test's limit fails it."""
        try:
            answer: tuple[bool, Any] = self._pipes[rank].recv()
        except EOFError:
            return False, "died"
        except BaseException:  # the limit: the next test cannot use ranks that are busy
            self.stop()
            raise
        return answer

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def stop(self) -> None:
        """Kill all ranks."""
        for process in (*self.processes, *([self.agent] if self.agent else [])):
            process.kill()
            process.join()
