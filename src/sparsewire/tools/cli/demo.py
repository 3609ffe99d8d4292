"""`sparsewire demo`: the gain to see with one's own eyes, on slow links if they can be had here."""

from __future__ import annotations

import sys
from dataclasses import replace

from ..lab import obstacle
from .options import BenchTrain, Demo
from .race import train

_DIGITS = BenchTrain(
    model="mnist",
    schemes=("TopK(0.01)", "Scheme(TopK(0.01), values=TwoBit())"),
    hidden=(1024, 1024),  # 1.9 million parameters: dense, a step sends 11 MB
    evaluate_every=50,
    limit_steps=800,
    rate="1gbit",
)
_TEXT = BenchTrain(model="gpt", target=2.0, evaluate_every=50, limit_steps=1000, rate="100mbit")
_SHOWN = {
    "mnist": (_DIGITS, "MNIST", "1 Gbit/s", "97 % of the test set are right"),
    "gpt": (_TEXT, "A small GPT and AdamW", "100 Mbit/s", "the validation loss is 2"),
}


def demo(options: Demo) -> int:
    """Train on four hosts until the target, with dense DDP and sparse."""
    why_not = obstacle()
    race, what, rate, until = _SHOWN[options.model]
    if not options.quiet:
        print(_opening(what, rate, until, why_not), file=sys.stderr, flush=True)
    return train(
        replace(
            race,
            loopback=why_not is not None,
            out=options.out,
            data=options.data,
            json=options.json,
            quiet=options.quiet,
            debug=options.debug,
        ),
        command="sparsewire demo",
    )


def _opening(what: str, rate: str, until: str, why_not: str | None) -> str:
    """What is about to be seen, and on what network."""
    if why_not is None:
        return (
            f"{what} on 4 hosts with links of {rate}, a network of its own on this machine, until "
            f"{until}: a few minutes"
        )
    return (
        f"{what} on 4 processes over loopback, which costs nothing: you will see fewer bytes, but "
        f"no shorter steps. For slow links: {why_not}"
    )
