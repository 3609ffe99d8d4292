"""`Loopback`: the ranks of a lab without a lab, for machines where none can be built."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import LabError
from .processes import Processes, variables

_ADDRESS = "127.0.0.1"
_INTERFACE = "lo" if sys.platform == "linux" else "lo0"


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
