"""The variables by which `torch.distributed` learns who it is and where the others are."""

from __future__ import annotations

import os


def variables(
    rank: int, hosts: int, master: str, port: int, interface: str, together: bool = False
) -> dict[str, str]:
    """What torchrun would set for one rank, and which interface to use.

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
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
