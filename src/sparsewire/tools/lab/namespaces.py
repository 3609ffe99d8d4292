"""Network namespaces: being in one, and removing one with every process in it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import plan
from .commands import LabError, run

_HOME = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_PATIENCE = 5.0  # seconds for killed processes to be gone


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Move the calling thread into a namespace; sockets created there stay there."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        there = os.open(_HOME / namespace, os.O_RDONLY)
    except OSError:
        os.close(before)
        raise LabError(f"there is no namespace {namespace}: its lab is closed") from None
    try:
        _enter(there)
        yield
    finally:
        _enter(before)
        os.close(there)
        os.close(before)


def remove(names: Iterable[str]) -> None:
    """Kill every process in the namespaces and remove them, as far as they still exist."""
    there = [name for name in names if (_HOME / name).exists()]
    _kill_in(there)
    for name in there:
        try:
            run(plan.remove(name))
        except LabError:
            if (_HOME / name).exists():
                raise


def _enter(opened: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(opened, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot enter a network namespace: {os.strerror(code)}")


def _kill_in(names: list[str]) -> None:
    homes = {_identity(_HOME / name) for name in names} - {None}
    deadline = time.monotonic() + _PATIENCE
    while _kill_once(homes) and time.monotonic() < deadline:
        time.sleep(0.01)


def _kill_once(homes: set[tuple[int, int] | None]) -> int:
    """Kill every other process that is in one of these namespaces, and count them."""
    found = 0
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        if pid == os.getpid() or _identity(Path(f"/proc/{pid}/ns/net")) not in homes:
            continue
        with contextlib.suppress(ProcessLookupError):
            held = os.pidfd_open(pid)
            try:
                # The number may belong to another process by now, but the held descriptor does not.
                if _identity(Path(f"/proc/{pid}/ns/net")) in homes:
                    signal.pidfd_send_signal(held, signal.SIGKILL)
                    found += 1
            finally:
                os.close(held)
    return found


def _identity(namespace: Path) -> tuple[int, int] | None:
    try:
        found = namespace.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
