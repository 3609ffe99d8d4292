"""Runs a command as root of a user namespace, where an ordinary user may make networks.

    python -I -S usernamespace.py new COMMAND [ARGUMENTS]
    python -I -S usernamespace.py PID COMMAND [ARGUMENTS]

With `new` the command gets user, mount and network namespaces of its own. It sees itself as root,
while the rest of the machine still sees the user who started it: the same files, with the same
owner. It keeps its process id, terminal and environment, since this script replaces itself with
it. Whatever it leaves running is killed when it ends, even by SIGKILL. With PID the command joins
the namespaces of that process.

A namespace can only be entered by a process with a single thread, so this is a script of its own
that needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
import time

REFUSED = 125  # exit code: the kernel does not allow the namespaces

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC = 0x2, 0x4, 0x1000, 0x4000
_PR_SET_PDEATHSIG = 1
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_PATIENCE = 5.0  # seconds for killed processes to be gone


def main(place: str, command: list[str]) -> None:
    """Enter the namespaces and become the command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C shows no traceback
    try:
        if place == "new":
            _enter()
            _guard()
        else:
            _join(int(place))
    except OSError as error:
        print(error.filename or "namespaces", error.strerror, sep=": ", file=sys.stderr)
        sys.exit(REFUSED)
    os.execvp(command[0], command)


def _enter() -> None:
    """Enter new user, mount and network namespaces, and set up loopback and /run in them."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWNET)
    _write("/proc/self/setgroups", "deny")  # without this the kernel refuses the map of groups
    _write("/proc/self/uid_map", f"0 {user} 1")
    _write("/proc/self/gid_map", f"0 {group} 1")
    _replace_run()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def _replace_run() -> None:
    """Mount a /run that can be written, with the machine's own content except for its labs.

    The mount is seen in this namespace only. The rest of /run is bound into it, since it can hold
    the programs of the system, as on NixOS, or the user's disks, as in /run/media.
    """
    machines = os.open("/run", os.O_RDONLY | os.O_DIRECTORY)
    _call("mount", b"tmpfs", b"/run", b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=755")
    for name in set(os.listdir(machines)) - {"netns", "sparsewire"}:
        source, target = f"/proc/self/fd/{machines}/{name}", f"/run/{name}"
        with contextlib.suppress(OSError):  # leave out what cannot be bound
            if os.path.islink(source):
                os.symlink(os.readlink(source), target)
                continue
            if os.path.isdir(source):
                os.mkdir(target)
            else:
                os.close(os.open(target, os.O_CREAT))
            _call("mount", source.encode(), target.encode(), None, _MS_BIND | _MS_REC, None)
    os.close(machines)


def _join(pid: int) -> None:
    """Enter the namespaces of a process."""
    opened = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("user", "mnt", "net")]
    for namespace in opened:
        _call("setns", namespace, 0)
        os.close(namespace)


def _guard() -> None:
    """Fork a process that waits for the end of this one, then kills what is left in the namespace.

    A namespace exists for as long as a process is in it, and no later lab can see into this one.
    """
    owner = os.getpid()
    if os.fork():
        return
    os.setsid()  # the terminal's Ctrl-C is for the command
    os.chdir("/")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)  # so that no reader waits for this process's output
    awaited = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGTERM)
    while os.getppid() == owner:
        signal.sigwait(awaited)
    deadline = time.monotonic() + _PATIENCE
    while _kill_all() and time.monotonic() < deadline:
        time.sleep(0.01)
    os._exit(0)


def _kill_all() -> int:
    """Kill every other process of this user namespace, and count them."""
    found = 0
    mine = os.stat("/proc/self/ns/user")
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with contextlib.suppress(OSError):
            os.stat(f"/proc/{pid}/ns/net")  # a process that has ended has none
            theirs = os.stat(f"/proc/{pid}/ns/user")
            if os.path.samestat(theirs, mine) and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
                found += 1
    return found


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0 if all is well."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)


def _write(path: str, text: str) -> None:
    opened = os.open(path, os.O_WRONLY)
    try:
        os.write(opened, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(opened)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
