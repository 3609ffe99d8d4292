"""`sparsewire demo`: the gain to see with one's own eyes, on slow links if they can be had here."""

from __future__ import annotations

import sys

from ..lab import obstacle
from .compare import compare
from .options import Compare, Demo

_RATE = "1gbit"
_HIDDEN = (1024, 1024)  # 1.9 million parameters: a step sends 11 MB if nothing is left out
_EPOCHS = 2
_SCHEMES = (
    "Dense()",
    "TopK(0.01)",
    "Scheme(TopK(0.01), values=TwoBit())",
    "BlockRandomK(0.01)",
)


def demo(options: Demo) -> int:
    """Train MNIST with a few schemes on four hosts, and compare them."""
    why_not = obstacle()
    if not options.quiet:
        print(_opening(why_not), file=sys.stderr, flush=True)
    return compare(
        Compare(
            task="mnist",
            schemes=_SCHEMES,
            hidden=_HIDDEN,
            epochs=_EPOCHS,
            rate=None if why_not else _RATE,
            out=options.out,
            data=options.data,
            json=options.json,
            quiet=options.quiet,
            debug=options.debug,
        )
    )


def _opening(why_not: str | None) -> str:
    """What is about to be seen, and on what network."""
    if why_not is None:
        return (
            "MNIST on 4 hosts with links of 1 Gbit/s, a network of its own on this machine: "
            "about 4 minutes"
        )
    return (
        f"MNIST on 4 processes over loopback, which costs nothing: you will see fewer bytes, but "
        f"no shorter steps. For slow links: {why_not}"
    )
