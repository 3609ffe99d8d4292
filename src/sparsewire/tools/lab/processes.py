"""Processes that never outlive this one, and the variables by which they find each other.

`Loopback` runs the ranks of a lab without a lab, for machines where none can be built.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .commands import LabError

_ADDRESS = "127.0.0.1"
_INTERFACE = "lo" if sys.platform == "linux" else "lo0"

# Run before the command itself, in place of `preexec_fn`, which is not safe beside threads. The
# kernel ends it with its parent, even by kill -9, unless the parent was gone before it was asked.
_MORTAL = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this one is gone")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot run {sys.argv[2]}: {error.strerror}")
"""


class Processes:
    """Starts processes in sessions of their own, and kills those that still run at the end."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[Any]] = []
        # The kernel looks at the thread that started a process: this one stays until the end.
        self._starter = ThreadPoolExecutor(1, "sparsewire-lab")

    def start(
        self, command: Sequence[str], env: Mapping[str, str] | None, keywords: dict[str, Any]
    ) -> subprocess.Popen[Any]:
        """Start `command` with `env` on top of this process's own variables."""
        words = [sys.executable, "-I", "-S", "-c", _MORTAL, str(os.getpid()), *command]
        variables = {**os.environ, **(env or {})}

        def begin() -> subprocess.Popen[Any]:
            process = subprocess.Popen(words, env=variables, start_new_session=True, **keywords)
            self._started.append(process)
            return process

        return self._starter.submit(begin).result()

    def end(self) -> None:
        """Kill every process that still runs, and its children in the same session."""
        self._starter.shutdown()
        for process in self._started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Loopback:
    """Hosts that are all this machine, over 127.0.0.1, unshaped."""

    def __init__(self, hosts: int = 4) -> None:
        if hosts < 1:
            raise LabError(f"there must be at least one host, not {hosts}")
        self.hosts = hosts
        self.addresses = [_ADDRESS] * hosts
        self._processes = Processes()

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes that still run."""
        self._processes.end()

    def start(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        **popen_keywords: Any,
    ) -> subprocess.Popen[Any]:
        """Start a program, in a session of its own; it dies with this process."""
        return self._processes.start(argv, env, popen_keywords)

    def inside(self, host: int) -> contextlib.AbstractContextManager[None]:
        """Do nothing: every host is this machine."""
        return contextlib.nullcontext()

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """The variables by which `torch.distributed` in process `rank` finds the others."""
        return variables(rank, self.hosts, _ADDRESS, port, _INTERFACE, together=True)


def variables(
    rank: int, hosts: int, master: str, port: int, interface: str, together: bool = False
) -> dict[str, str]:
    """Return the variables that torchrun would set for one rank, and the interface to use.

    Args:
        together: the ranks are processes of one host, not hosts with one process each.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(hosts),
        "LOCAL_RANK": str(rank if together else 0),
        "LOCAL_WORLD_SIZE": str(hosts if together else 1),
        "NODE_RANK": str(0 if together else rank),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        # Either way they share this machine's cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // hosts))),
    }


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
