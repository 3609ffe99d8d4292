"""`sparsewire demo`: dense and sparse training compared, on slow links if a lab can be built."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from sparsewire.report import human_bytes

from ..bench.train.columns import Race, table
from ..bench.train.report import headline
from ..lab import obstacle
from .bench_session import tell
from .bench_train import run
from .options import BenchTrain, Demo

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
    "mnist": (
        _DIGITS,
        "Training a perceptron on MNIST until 97 % of the test set are right",
        "1 Gbit/s",
        "three times: dense, then with two sparse schemes. It takes about 2 minutes on 2 cores.",
    ),
    "gpt": (
        _TEXT,
        "Training a small GPT with AdamW until the validation loss is 2",
        "100 Mbit/s",
        "twice: dense, then with a sparse scheme. It takes about 4 minutes on 2 cores.",
    ),
}
_NEXT = """next: {} explain "TopK(0.01)" --params 11e6 --workers 8"""


def demo(options: Demo) -> int:
    """Train on four hosts until the target, with dense DDP and sparse."""
    why_not = obstacle()
    asked, what, rate, how_long = _SHOWN[options.model]
    if not options.quiet:
        print(f"{what}, {how_long}", _place(rate, why_not), sep="\n", file=sys.stderr, flush=True)
    asked = replace(
        asked,
        loopback=why_not is not None,
        out=options.out,
        data=options.data,
        json=options.json,
        quiet=options.quiet,
        debug=options.debug,
    )
    results = run(asked, "sparsewire demo")
    race = Race(results)
    ending = [f"picture: {options.out / 'train.png'}", f"report: {options.out / 'report.html'}"]
    tell(results, asked, [table(race), conclusion(race), *ending, _NEXT.format(_program())])
    return 0


def _program() -> str:
    """Return how to start this program: by its name, or by its path if that is not found."""
    started = sys.argv[0]
    is_found = shutil.which("sparsewire") is not None or Path(started).name != "sparsewire"
    return "sparsewire" if is_found else started


def conclusion(race: Race) -> str:
    """Return the result in one sentence: time on slow links, bytes over loopback."""
    dense, schemes = race.run.dense, [one for one in race.arrived if one.kind == "scheme"]
    if race.run.network == "lab" or dense is None or not race.got_there(dense) or not schemes:
        return headline(race)
    least = min(schemes, key=lambda one: one.last.sent)
    return (
        f"To {race.aim}, {least.name} sends {human_bytes(least.last.sent)} and dense DDP "
        f"{human_bytes(dense.last.sent)}: {dense.last.sent / least.last.sent:.0f}× less."
    )


def _place(rate: str, why_not: str | None) -> str:
    """Describe the network."""
    if why_not is None:
        return f"It runs on 4 hosts with links of {rate}, a network of its own on this machine."
    return (
        "It runs on 4 processes over loopback, which costs nothing: you will see fewer bytes, but "
        f"no shorter steps. For slow links: {why_not}"
    )
