"""`lab`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .declare import option


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Run a command on a cluster of shaped network namespaces on this machine.

    Every host runs COMMAND once, as one rank, with the variables that torchrun would set. Rank 0's
    output is shown, and every rank's is logged. The links are measured first; without COMMAND,
    nothing else is done. When a rank fails, the others are stopped. Ctrl-C is passed on to all
    ranks; a second one kills them. It needs Linux, `ip` and `tc`, and root or user namespaces;
    --loopback needs none of these, and shapes nothing.

    examples:
      sparsewire lab --hosts 4 --rate 1gbit -- sparsewire train mnist --scheme "TopK(0.01)"
      sparsewire lab --hosts 4 --rate 1gbit -- python train.py
      sparsewire lab --hosts 8 --rate 10gbit --rate 0=100mbit --oversubscribe 4 -- python train.py
      sparsewire lab --hosts 2 --rate 2.5gbit
      sparsewire lab --set 100mbit
      sparsewire lab --set 0=50mbit
    """

    hosts: int = option(4, "Number of hosts, each of which runs one rank.", "N")
    rate: tuple[str, ...] = option(
        (),
        "Rate of every link in both directions, like 1gbit or 100mbit. Repeat it as HOST=RATE for "
        "hosts with another rate.",
        "[HOST=]RATE",
        usual="unshaped",
        repeated=True,
    )
    oversubscribe: float = option(
        1.0,
        "Above 1, put the hosts into two racks, and limit the link between them to what the hosts "
        "of one rack can send divided by FACTOR.",
        "FACTOR",
    )
    check: bool = option(True, "Do not measure the links before the command runs.")
    logs: Path | None = option(
        None,
        "Folder for the output of the ranks: rank-0.log and so on.",
        "DIR",
        usual="a new folder in ./runs",
    )
    loopback: bool = option(
        False, "Run the ranks over 127.0.0.1, unshaped, where no lab can be built."
    )
    set: tuple[str, ...] = option(
        (),
        "Change the rate of a running lab, and exit.",
        "[HOST=]RATE",
        usual="",
        repeated=True,
    )
    lab: str | None = option(None, "The lab that --set changes.", "ID", usual="the only one")
    debug: bool = option(False, "Show tracebacks.")
    command: tuple[str, ...] = field(default=())  # the words after --
