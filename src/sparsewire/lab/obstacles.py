"""Why no lab can be built here, and what to do about it."""

from __future__ import annotations

import functools
import os
import sys

from .cluster import Lab
from .commands import find
from .errors import LabError

_HINTS = {
    "Operation not permitted": "this container may not make networks: start it with --privileged",
    "qdisc kind is unknown": "this kernel has no token bucket: load it with `modprobe sch_tbf`",
    "Unknown device type": "this kernel lacks virtual networks: try `modprobe veth bridge`",
}


def lacking() -> str | None:
    """What is missing here for labs to be built or changed, as far as can be seen at once."""
    if sys.platform != "linux":
        return "a lab is made of Linux network namespaces: run it on Linux, or in a Linux VM"
    if os.geteuid():
        return "a lab needs root to make network namespaces: run it with sudo"
    for command in ("ip", "tc"):
        if find(command) is None:
            return f"a lab needs the command {command}: install iproute2"
    return None


@functools.cache
def obstacle() -> str | None:
    """Why no lab can be built here, as a sentence that says what to do; None if one can.

    What the kernel allows is found out by building a small one, once in a process.
    """
    reason = lacking()
    if reason:
        return reason
    try:
        with Lab(hosts=1, rate="1gbit"):
            return None
    except LabError as error:
        for words, hint in _HINTS.items():
            if words in str(error):
                return f"{hint} ({error})"
        return str(error)
