"""`list` and `explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .declare import MODELS, argument, at_least, between, option


@dataclass(frozen=True, kw_only=True)
class List:
    """List the families of parts that make up a scheme, one line for each part.

    examples:
      sparsewire list
      sparsewire list --json
    """

    json: bool = option(False, "Print JSON.")


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Show what a scheme sends, and how, without training anything.

    examples:
      sparsewire explain "TopK(0.01)" --params 11e6 --workers 8
      sparsewire explain "Scheme(TopK(0.01), scope='global')" --model mnist --json
      sparsewire explain "TopK(0.01)" --model my_models:small
      sparsewire explain "TopK(0.01)" --communicate updates --every 15
    """

    scheme: str = argument("The scheme to explain.", "SCHEME")
    params: float = option(
        11e6,
        "Number of parameters, taken as one matrix.",
        "N",
        usual="11e6",
        limit=between(1, 10**12),
    )
    model: str | None = option(
        None,
        "Explain for this model instead, layer by layer: one of these, or your own as in `bench`.",
        MODELS,
        usual="",
    )
    hidden: tuple[int, ...] = option(
        (256, 256), "Widths of the hidden layers of --model mnist.", "N", limit=at_least(1)
    )
    workers: int = option(8, "Number of workers that exchange.", "N", limit=at_least(1))
    communicate: Literal["gradients", "updates"] = option("gradients", "What the workers exchange.")
    every: int = option(1, "Local steps between two exchanges of updates.", "H", limit=at_least(1))
    json: bool = option(False, "Print JSON.")
