"""Why no lab can be built here, and what to do about it."""

from __future__ import annotations

import functools
import subprocess

from . import rootless
from .cluster import Lab
from .commands import find
from .errors import LabError

_HINTS = {
    "Operation not permitted": "this container may not make networks: start it with --privileged",
    "qdisc kind is unknown": "this kernel has no token bucket: load it with `modprobe sch_tbf`",
    "Unknown device type": "this kernel lacks virtual networks: try `modprobe veth bridge`",
}


@functools.cache
def obstacle() -> str | None:
    """Why no lab can be built here, as a sentence that says what to do; None if one can.

    What the kernel allows is found out by building a small one, once in a process.
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
