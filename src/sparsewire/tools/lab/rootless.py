"""Labs without root: in a user namespace, where an ordinary user may create networks.

Every lab of this kind is in a namespace of its own with the program that built it, and so are its
records: neither root's labs nor those of other programs can be seen from there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from . import records, usernamespace
from .commands import LabError
from .records import Record

_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 1 << 12, 1 << 21
_SYSCTLS = {
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user.max_user_namespaces": ("0", "15000"),
    "user.max_net_namespaces": ("0", "15000"),
    "user.max_mnt_namespaces": ("0", "15000"),
}
"""Kernel settings that forbid user namespaces: the value that does, and one that does not."""
_ASIDE = """
import sys
sys.path.append(sys.argv[1])
from sparsewire.tools.lab import LabError, cluster, rootless, set_rate
try:
    sys.exit({})
except LabError as error:
    sys.exit(str(error))
"""


def privileged() -> bool:
    """Whether this process may create networks: as root, unless a container drops the rights."""
    if sys.platform != "linux" or os.geteuid():
        return False
    found = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    needed = _CAP_NET_ADMIN | _CAP_SYS_ADMIN
    return found is None or int(found[1], 16) & needed == needed


def lacking() -> str | None:
    """Return what this process lacks to create networks and what to do about it, or None."""
    if sys.platform != "linux":
        return "a lab is made of Linux network namespaces: run it on Linux, or in a Linux VM"
    if privileged():
        return None
    return refusal() or (
        "a lab needs root or a user namespace: run this program with sudo, or as a command of "
        "`sparsewire lab --hosts 1 --no-check --`"
    )


@functools.cache
def refusal() -> str | None:
    """Return why no lab can be built in a user namespace and what to do about it, or None.

    A small lab is built there to find out, once in a process.
    """
    # The rights are asked for first, so that no trial can ever lead to another one inside it.
    no = "this kernel gives no rights in a user namespace: networks are not permitted"
    ended = _aside("new", f"cluster.trial() if rootless.privileged() else {no!r}")
    if not ended.returncode:
        return None
    said = ended.stderr.strip()
    refused = ended.returncode == usernamespace.REFUSED
    if not refused and "not permitted" not in said:
        return said
    for name, (forbids, allows) in _SYSCTLS.items():
        setting = Path("/proc/sys", *name.split("."))
        if setting.exists() and setting.read_text().strip() == forbids:
            return (
                f"a lab needs root or a user namespace, which {name}={forbids} forbids: "
                f"use sudo, or run `sudo sysctl {name}={allows}` once"
            )
    if not refused:
        return said
    return (
        f"a lab needs root or a user namespace, which is forbidden here ({said}): use sudo, "
        "or start the container with --privileged if this is one"
    )


def enter() -> None:
    """Start this program anew in a user namespace, if labs can be built there and not here.

    It keeps its process id, and what its memory held is lost: call this before anything else.
    """
    if sys.platform == "linux" and not privileged() and refusal() is None:
        again = [sys.executable, *sys.orig_argv[1:]]
        os.execv(sys.executable, _command("new", again))


def labs() -> Iterator[Record]:
    """Yield the labs of this user's other programs, each in its own user namespace."""
    if sys.platform != "linux":
        return
    here = os.readlink("/proc/self/ns/user")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if os.readlink(process / "ns/user") == here:
                continue
            for record in records.read(process / "root/run/sparsewire"):
                if record.pid == int(process.name):
                    yield record


def set_rate(lab: str, rate: str, host: int | None) -> None:
    """Change the rate of one of these labs."""
    owner = next((record.pid for record in labs() if record.plan.id == lab), None)
    if owner is None:
        raise LabError(f"no lab {lab} of yours runs here")
    ended = _aside(str(owner), f"set_rate({lab!r}, {rate!r}, {host!r})")
    if ended.returncode:
        raise LabError(ended.stderr.strip())


def _aside(place: str, expression: str) -> subprocess.CompletedProcess[str]:
    """Evaluate an expression in a namespace, in another process; any result but None is an error.

    Args:
        place: "new", or the process whose namespaces to join.
    """
    source = Path(__file__).parents[3]
    python = [sys.executable, "-I", "-S", "-c", _ASIDE.format(expression), str(source)]
    return subprocess.run(
        _command(place, python),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        start_new_session=True,  # the terminal's Ctrl-C is for this process alone
    )


def _command(place: str, command: list[str]) -> list[str]:
    return [sys.executable, "-I", "-S", usernamespace.__file__, place, *command]
