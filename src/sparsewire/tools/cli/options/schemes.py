"""`list` and `explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from .common import MODELS, SchemeText

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
  sparsewire explain "TopK(0.01)" --model my_models:small
  sparsewire explain "TopK(0.01)" --communicate updates --every 15
"""


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Say what a scheme sends, and how, without training anything."""

    scheme: Positional[SchemeText]
    """The scheme to explain."""
    params: Annotated[float, arg(metavar="N", help_behavior_hint="(default: 11e6)")] = 11e6
    """Number of parameters, taken as one matrix."""
    model: Annotated[str | None, arg(metavar=MODELS, help_behavior_hint="")] = None
    """Explain for this model instead, layer by layer: one of these, or your own as in `bench`."""
    hidden: Annotated[tuple[int, ...], arg(metavar="N [N ...]")] = (256, 256)
    """Widths of the hidden layers of --model mnist."""
    workers: Annotated[int, arg(metavar="N")] = 8
    """How many workers exchange."""
    communicate: Literal["gradients", "updates"] = "gradients"
    """What they exchange."""
    every: Annotated[int, arg(metavar="H")] = 1
    """Local steps between two exchanges of updates."""
    json: bool = False
    """Print JSON."""
