"""The network interface of the host that this process runs on."""

from __future__ import annotations

import os
from pathlib import Path


def sent() -> int | None:
    """Bytes that it has sent; None where it is everybody's."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if name == "lo":
        return None
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        interface, _, numbers = line.partition(":")
        if interface.strip() == name:
            return int(numbers.split()[8])
    return None
