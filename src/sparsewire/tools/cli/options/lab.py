"""`lab`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Suppress, UseAppendAction, arg

_LOGS = "(default: a new folder in ./runs)"
_UNSHAPED = "(default: not shaped)"

LAB = """Run a command on a cluster of shaped network namespaces on this machine.

  sparsewire lab [OPTIONS] -- COMMAND [ARGUMENTS]

Every host runs COMMAND once, as one rank, with the variables that torchrun would set. Rank 0's
output is shown, everybody's is logged. The links are measured first; without COMMAND that is all.
When a rank fails, the others are stopped. Ctrl-C is passed on to all ranks; a second one kills
them. It needs Linux, `ip` and `tc`, and root or user namespaces; --loopback needs none of these,
and shapes nothing.

examples:
  sparsewire lab --hosts 4 --rate 1gbit -- sparsewire train mnist --scheme "TopK(0.01)"
  sparsewire lab --hosts 4 --rate 1gbit -- python train.py
  sparsewire lab --hosts 8 --rate 10gbit --rate 0=100mbit --oversubscribe 4 -- python train.py
  sparsewire lab --hosts 2 --rate 2.5gbit
  sparsewire lab --set 100mbit
  sparsewire lab --set 0=50mbit
"""


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Run a command on a cluster of shaped network namespaces on this machine."""

    hosts: Annotated[int, arg(metavar="N")] = 4
    """How many hosts, each of which runs one rank."""
    rate: Annotated[
        UseAppendAction[tuple[str, ...]],
        arg(metavar="[HOST=]RATE", help_behavior_hint=_UNSHAPED),
    ] = ()
    """How fast links are, both ways, like 1gbit or 100mbit. Repeat it as HOST=RATE for hosts whose
    link is another."""
    oversubscribe: Annotated[float, arg(metavar="FACTOR")] = 1.0
    """Above 1: put the hosts into two racks, and let the link between them carry what the hosts of
    one can send, divided by this."""
    check: Annotated[bool, arg(help_behavior_hint="")] = True
    """Do not measure the links before the command runs."""
    logs: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint=_LOGS)] = None
    """Folder for what the ranks print: rank-0.log and so on."""
    loopback: bool = False
    """No lab: run the ranks over 127.0.0.1, not shaped, where no lab can be built."""
    set: Annotated[
        UseAppendAction[tuple[str, ...]], arg(metavar="[HOST=]RATE", help_behavior_hint="")
    ] = ()
    """Change the rate of a lab that runs already, and leave."""
    lab: Annotated[str | None, arg(metavar="ID", help_behavior_hint="(default: the only one)")] = (
        None
    )
    """Which lab --set is for."""
    debug: bool = False
    """Show tracebacks."""
    command: Suppress[tuple[str, ...]] = ()
