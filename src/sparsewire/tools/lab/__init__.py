"""A cluster on one Linux machine: every host a network namespace, every link as slow as asked.

    from sparsewire.tools.lab import Lab

    with Lab(hosts=4, rate="1gbit", rates={0: "100mbit"}) as lab:
        ranks = [lab.start(h, ["python", "train.py"], lab.environment(h, 29500)) for h in range(4)]
        codes = [rank.wait() for rank in ranks]

The network is the kernel's own, so any program runs in it unchanged. Nothing of it lies in the
machine's own network, and nothing of it stays behind. It needs Linux, and root or a user namespace,
which the command line makes by itself; `obstacle()` says what is missing. `Loopback` does without:
the same ranks on 127.0.0.1, unshaped.
"""

from .cluster import Lab, obstacle, running, set_rate
from .commands import LabError
from .links import Link
from .processes import Loopback, cores
from .rates import parse_rate, show_rate
from .signals import Interrupts

__all__ = [
    "Interrupts",
    "Lab",
    "LabError",
    "Link",
    "Loopback",
    "cores",
    "obstacle",
    "parse_rate",
    "running",
    "set_rate",
    "show_rate",
]
