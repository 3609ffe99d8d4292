"""`Lab`: builds a cluster of namespaces, runs programs in it, and leaves nothing behind.

`obstacle` says why no lab can be built here.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import namespaces, plan, records, rootless
from .commands import LabError, find, run_all
from .links import Link, measure
from .plan import INTERFACE, Plan
from .processes import Processes, variables
from .rates import parse_rate
from .records import Record
from .signals import Unwinding, postponed

_HINTS = {
    "Operation not permitted": "this container may not make networks: start it with --privileged",
    "qdisc kind is unknown": "this kernel has no token bucket: load it with `modprobe sch_tbf`",
    "Unknown device type": "this kernel lacks virtual networks: try `modprobe veth bridge`",
}


class Lab:
    """A cluster of hosts on one machine, with links of the given rates.

    Args:
        hosts: how many.
        rate: every link's, both ways, like "1gbit"; None leaves links as fast as the machine.
        rates: other rates for some of the hosts.
        oversubscribe: above 1, hosts stand in two racks, and the link between them carries what
            the hosts of one can send, divided by this.
    """

    def __init__(
        self,
        hosts: int = 4,
        rate: str | None = None,
        rates: Mapping[int, str] | None = None,
        oversubscribe: float = 1.0,
    ) -> None:
        usual = None if rate is None else parse_rate(rate)
        made = Plan(secrets.token_hex(4), (usual,) * max(hosts, 0), usual, oversubscribe)
        for host, other in (rates or {}).items():
            made = made.with_rate(parse_rate(other), host)
        self.hosts = hosts
        self.addresses = [plan.address(host) for host in range(hosts)]
        self._record = Record.of_mine(made)
        self._processes = Processes()
        self._unwinding = Unwinding()

    @property
    def id(self) -> str:
        """The id that distinguishes this lab from others that run at the same time."""
        return self._record.plan.id

    def __enter__(self) -> Lab:
        reason = rootless.lacking()
        if reason:
            raise LabError(reason)
        sweep()
        self._unwinding.begin()
        atexit.register(self.close)
        try:
            self._record.write()
            run_all(plan.build(self._record.plan))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every process in the lab, and remove it."""
        if os.getpid() != self._record.pid:
            return  # a copy in a forked process
        try:
            with postponed():
                self._processes.end()
                _remove(self._record)
                atexit.unregister(self.close)
        finally:
            self._unwinding.end()

    def start(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        **popen_keywords: Any,
    ) -> subprocess.Popen[Any]:
        """Start a program on a host, in a session of its own; it dies with this process.

        Args:
            env: variables on top of this process's own.
            popen_keywords: as for `subprocess.Popen`.
        """
        self._record.plan.check_host(host)
        command = [find("ip") or "ip", "netns", "exec", self._record.plan.host(host), *argv]
        return self._processes.start(command, env, popen_keywords)

    def inside(self, host: int) -> contextlib.AbstractContextManager[None]:
        """Move the calling thread to a host; sockets created there stay there."""
        self._record.plan.check_host(host)
        return namespaces.inside(self._record.plan.host(host))

    def set_rate(self, rate: str, host: int | None = None) -> None:
        """Change the rate of one host's link, or of all, while things run."""
        set_rate(self.id, rate, host)

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """The variables by which `torch.distributed` on host `rank` finds the others."""
        self._record.plan.check_host(rank)
        return variables(rank, self.hosts, self.addresses[0], port, INTERFACE)

    def check(self, progress: Callable[[int, int], None] | None = None) -> list[Link]:
        """Measure every link both ways, about a second each; nothing else should run meanwhile.

        Args:
            progress: called with the number of transfers done and their total.
        """
        return measure(_find(self.id).plan, progress)


@functools.cache
def obstacle() -> str | None:
    """Return why no lab can be built here and what to do about it; None if one can.

    A small lab is built to find out what the kernel allows, once in a process.
    """
    reason = rootless.lacking()
    if reason:
        return reason
    for command in ("ip", "tc"):
        if find(command) is None:
            return f"a lab needs the command {command}: install iproute2"
    return trial()


def trial() -> str | None:
    """Build a small lab and run something in it: None if that works, else why not."""
    try:
        with Lab(hosts=1, rate="1gbit") as lab:
            ended = lab.start(0, ["true"], stderr=subprocess.PIPE, text=True)
            said = " ".join(ended.communicate()[1].split())
            return f"nothing can be run in a lab here ({said})" if ended.returncode else None
    except LabError as error:
        for words, hint in _HINTS.items():
            if words in str(error):
                return f"{hint} ({error})"
        return str(error)


def sweep() -> None:
    """Remove the labs whose owner has ended, and no others."""
    with postponed(), records.alone():
        for record in records.read_all():
            if not record.owned:
                # A lab that cannot be removed must not keep this one from being built.
                with contextlib.suppress(LabError):
                    _remove(record)


def running() -> list[Plan]:
    """The labs on this machine that this user's programs use."""
    found = records.read_all() if rootless.privileged() else rootless.labs()
    return [record.plan for record in found if record.owned]


def set_rate(lab: str, rate: str, host: int | None = None) -> None:
    """Change the rate of a running lab, which may be another process's."""
    bits = parse_rate(rate)
    if not rootless.privileged():
        rootless.set_rate(lab, rate, host)
        return
    with records.alone():
        record = _find(lab)
        changed = replace(record, plan=record.plan.with_rate(bits, host))
        run_all(plan.shape(changed.plan))
        changed.write()


def _find(lab: str) -> Record:
    for record in records.read_all():
        if record.plan.id == lab and record.owned:
            return record
    raise LabError(f"no lab {lab} runs here")


def _remove(record: Record) -> None:
    namespaces.remove(record.plan.namespaces)
    record.delete()
