"""`sparsewire demo`: the gain to see with one's own eyes, on slow links if they can be had here."""

from __future__ import annotations

import sys

from ..lab import obstacle
from .options import BenchTrain, Demo
from .race import train

_RATE = "1gbit"
_SCHEMES = ("TopK(0.01)", "Scheme(TopK(0.01), values=TwoBit())")


def demo(options: Demo) -> int:
    """Train MNIST to 97 % on four hosts, with dense DDP and with two schemes."""
    why_not = obstacle()
    if not options.quiet:
        print(_opening(why_not), file=sys.stderr, flush=True)
    return train(
        BenchTrain(
            schemes=_SCHEMES,
            hidden=(1024, 1024),  # 1.9 million parameters: dense, a step sends 11 MB
            evaluate_every=50,
            limit_steps=800,
            rate=_RATE,
            loopback=why_not is not None,
            out=options.out,
            data=options.data,
            json=options.json,
            quiet=options.quiet,
            debug=options.debug,
        ),
        command="sparsewire demo",
    )


def _opening(why_not: str | None) -> str:
    """What is about to be seen, and on what network."""
    if why_not is None:
        return (
            "MNIST on 4 hosts with links of 1 Gbit/s, a network of its own on this machine, until "
            "97 % of the test set are right: a few minutes"
        )
    return (
        f"MNIST on 4 processes over loopback, which costs nothing: you will see fewer bytes, but "
        f"no shorter steps. For slow links: {why_not}"
    )
