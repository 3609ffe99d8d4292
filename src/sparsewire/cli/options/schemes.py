"""`list` and `explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from .common import SchemeText

LIST = """List the families of parts that a scheme is made of, each part with one line.

examples:
  sparsewire list
  sparsewire list --json
"""


@dataclass(frozen=True, kw_only=True)
class List:
    """List the families of parts that a scheme is made of."""

    json: bool = False
    """Print JSON."""


EXPLAIN = """Say what a scheme sends, and how, without training anything.

examples:
  sparsewire explain "TopK(0.01)" --params 11e6 --workers 8
  sparsewire explain "Scheme(TopK(0.01), scope='global')" --model mnist --json
"""


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Say what a scheme sends, and how, without training anything."""

    scheme: Positional[SchemeText]
    """The scheme to explain."""
    params: Annotated[float, arg(metavar="N", help_behavior_hint="(default: 11e6)")] = 11e6
    """Number of parameters, taken as one matrix."""
    model: Annotated[Literal["mnist"] | None, arg(metavar="{mnist}", help_behavior_hint="")] = None
    """Explain for this task's model instead, with all its layers."""
    hidden: Annotated[tuple[int, ...], arg(metavar="N [N ...]")] = (256, 256)
    """Widths of the hidden layers of --model mnist."""
    workers: Annotated[int, arg(metavar="N")] = 8
    """How many workers exchange."""
    json: bool = False
    """Print JSON."""
