"""A process that has everything imported and forks ranks from itself, which takes milliseconds.

    python -m tests.chaos.zygote [FOLDER BYTES]

With a folder, a disk of that many bytes is mounted there, which nobody else on the machine sees and
which goes with the processes. Tasks come in as lines of JSON, and what became of the forked
processes goes out likewise. A forked process runs `tests.chaos.rank` and ends as a script does.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_CLONE_NEWNS, _CLONE_NEWNET, _PR_SET_PDEATHSIG = 0x00020000, 0x40000000, 1


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def die_with(parent: int) -> None:
    """Have the kernel end this process with its parent."""
    _check(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")


def _mount(folder: str, size: str) -> None:
    _check(ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS))
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)


def _enter(namespace: str) -> None:
    there = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
    _check(ctypes.CDLL(None, use_errno=True).setns(there, _CLONE_NEWNET))
    os.close(there)


def _say(**fields: Any) -> None:
    os.write(1, (json.dumps(fields) + "\n").encode())


def _serve() -> dict[str, Any]:
    """Fork one process for each task; returns the task in the forked process."""
    waiting = b""
    while True:
        if select.select([0], [], [], 0.005)[0]:
            came = os.read(0, 1 << 16)
            if not came:
                sys.exit(0)
            waiting += came
        *lines, waiting = waiting.split(b"\n")
        for line in lines:
            me, task = os.getpid(), json.loads(line)
            pid = os.fork()
            if pid == 0:
                die_with(me)
                return dict(task)
            _say(started=pid)
        _reap()


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say(ended=pid, code=os.waitstatus_to_exitcode(status), time=time.monotonic())


def main() -> None:
    die_with(os.getppid())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if len(sys.argv) == 3:
        _mount(*sys.argv[1:])
    from sparsewire import kernels

    from . import rank

    rank.torch.set_num_threads(1)
    kernels.prepare("cpu")
    rank.prepare()
    gc.freeze()  # a rank must not look through all that is imported when it ends
    _say(ready=True)
    task = _serve()
    output = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(output, target)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable()  # says what all threads do in a crash
    if task["namespace"]:
        _enter(task["namespace"])
    rank.main(task)


if __name__ == "__main__":
    main()
