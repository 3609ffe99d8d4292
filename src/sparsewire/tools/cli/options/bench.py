"""`bench step`, `bench train` and `bench scale`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .declare import MODELS, POSITIVE, SECONDS, Output, at_least, between, option
from .training import RACE_PLACES

RACE_RATES = "0.005 for adagrad, 0.05 for sgd, 0.002 for adamw"
BENCH_SCHEMES = (
    "TopK(0.01)",
    "Threshold(0.01)",
    "Scheme(TopK(0.01), values=TwoBit())",
    "BlockRandomK(0.01)",
)
SCALE_SCHEMES = (
    "TopK(0.01)",
    "Scheme(TopK(0.01), collective=Sharded())",
    "Scheme(TopK(0.01), values=TwoBit())",
    "Scheme(TopK(0.01), values=TwoBit(), collective=Sharded())",
)
PEERS = ("dense", "fp16", "bf16", "powersgd-1", "powersgd-4")
_BATCHES = "40 for mnist, 16 for resnet18, 8 for transformer"
_OF_MODEL = "depends on --model"
_OWN_MODEL = "Model to train: one of these, or your own function(rank) that returns (model, loss)."
_SCHEMES = (
    "sparsewire's schemes; 'updates [every H] SCHEME' exchanges updates instead of gradients."
)
_LINKS = "Rate of every host's link, like 1gbit; none leaves links unshaped."
_HOSTS = "Number of hosts, each with one worker process."
_EXAMPLES = "Examples per host and step; for your own model, the size of its batches."


@dataclass(frozen=True, kw_only=True)
class Bench(Output):
    """Options shared by all measurements."""

    loopback: bool = option(
        False,
        "Measure over 127.0.0.1 instead of in a lab; rates are ignored.",
    )
    timeout: float = option(
        120.0, "How long a step may take before it counts as hung.", "SECONDS", limit=SECONDS
    )


@dataclass(frozen=True, kw_only=True)
class BenchStep(Bench):
    """Measure what a training step costs with each scheme and each peer, side by side.

    Hosts are network namespaces whose links have the given rates. This needs Linux, and root or
    user namespaces; --loopback needs neither. All schemes and peers take turns in the same run. The
    table is printed; an HTML report, a picture and every step as JSON are written to --out.

    examples:
      sparsewire bench step --model resnet18 --rate 1gbit
      sparsewire bench step --rates 100mbit 1gbit 10gbit none --out runs/rates
      sparsewire bench step --loopback --hosts 2 --model transformer --peers dense
      sparsewire bench step --schemes "TopK(0.01)" "updates TopK(0.01)"
      sparsewire bench step --model my_models:small --schemes "TopK(0.001)" --batch-size 32
    """

    model: str = option("mnist", _OWN_MODEL, MODELS)
    schemes: tuple[str, ...] = option(BENCH_SCHEMES, _SCHEMES, "SCHEME", may_be_empty=True)
    peers: tuple[str, ...] = option(
        PEERS,
        "Baselines, besides compute alone; `nothing` is DDP without an exchange.",
        "PEER",
        may_be_empty=True,
    )
    hosts: int = option(4, _HOSTS, "N", limit=at_least(2))
    rates: tuple[str, ...] = option(
        ("1gbit",),
        "Rates of every host's link, like 1gbit, each measured in turn; none leaves links "
        "unshaped.",
        "RATE",
        also=("--rate",),
    )
    batch_size: int | None = option(None, _EXAMPLES, "N", usual=_BATCHES, limit=at_least(1))
    rounds: int = option(
        5, "Turns per scheme and peer; the spread covers all of them.", "N", limit=at_least(1)
    )
    steps: int = option(
        5,
        "Steps measured per turn; fewer where a step takes a second or more.",
        "N",
        limit=at_least(2),
    )
    out: Path = option(
        Path("runs/bench-step"),
        "Folder for results.json, report.html, step.png and step.svg.",
        "DIR",
    )


@dataclass(frozen=True, kw_only=True)
class BenchTrain(Bench):
    """Measure how long training takes to a target, dense and sparse.

    Each contender trains the same network from the same weights on the same batches until the test
    score reaches the target: by default 97 % accuracy for a perceptron on MNIST, or a validation
    loss of 1.9 for a small GPT on text. The clock counts training steps alone. Hosts are network
    namespaces whose links have the given rate. This needs Linux, and root or user namespaces;
    --loopback needs neither. The table is printed; an HTML report, a picture and the curves as JSON
    are written to --out.

    examples:
      sparsewire bench train
      sparsewire bench train --rate 100mbit --schemes "TopK(0.01)" "TopK(0.001)"
      sparsewire bench train --model gpt --rate 100mbit --peers dense bf16 powersgd-4
      sparsewire bench train --loopback --hosts 2 --hidden 256 --target 0.9
    """

    model: Literal["mnist", "gpt"] = option(
        "mnist", "What to train: a perceptron on MNIST, or a small GPT on text."
    )
    schemes: tuple[str, ...] | None = option(
        None, _SCHEMES, "SCHEME", usual=_OF_MODEL, may_be_empty=True
    )
    peers: tuple[str, ...] = option(
        ("dense",),
        "Baselines: dense, fp16, bf16, powersgd-1, powersgd-4, nothing.",
        "PEER",
        may_be_empty=True,
    )
    target: float | None = option(
        None,
        "Score that ends a training: test accuracy in 0 to 1 for mnist, validation loss for gpt.",
        "SCORE",
        usual=_OF_MODEL,
    )
    hosts: int = option(4, _HOSTS, "N", limit=at_least(2))
    rate: str = option("1gbit", _LINKS, "RATE")
    batch_size: int | None = option(
        None,
        "Images, or windows of text, per host and step.",
        "N",
        usual=_OF_MODEL,
        limit=at_least(1),
    )
    hidden: tuple[int, ...] = option(
        (), "Widths of the hidden layers.", "N", usual=_OF_MODEL, limit=at_least(1)
    )
    optimizer: Literal["adagrad", "sgd", "adamw"] | None = option(
        None, "Optimizer; sgd has momentum 0.9.", usual=_OF_MODEL
    )
    lr: float | None = option(
        None,
        "Learning rate, the same for all contenders.",
        "RATE",
        usual=RACE_RATES,
        limit=POSITIVE,
    )
    evaluate_every: int = option(
        25,
        "Steps between two tests, during which the clock stops.",
        "N",
        limit=at_least(1),
    )
    limit_steps: int | None = option(
        None,
        "Steps after which a training ends even if it has not reached the target.",
        "N",
        usual=_OF_MODEL,
        limit=at_least(1),
    )
    seed: int = option(
        0,
        "Seed of the initial weights and of the order of the images.",
        "N",
        limit=between(0, 2**31 - 1),
    )
    data: Path | None = option(
        None,
        "Folder with the four MNIST idx files, or a text file for gpt.",
        "PATH",
        usual=RACE_PLACES,
    )
    out: Path = option(
        Path("runs/bench-train"),
        "Folder for results.json, report.html, train.png and train.svg.",
        "DIR",
    )


@dataclass(frozen=True, kw_only=True)
class BenchScale(Bench):
    """Measure bytes and time per step against the number of hosts, and model more.

    Compute alone, dense DDP and the schemes take turns on networks of each size, as in `bench
    step`. A model is fitted to these measurements. The tables show its error on each of them and
    its prediction for up to --most hosts that do not share cores. The tables are printed; an HTML
    report, a picture and all steps as JSON are written to --out.

    examples:
      sparsewire bench scale
      sparsewire bench scale --hosts 2 4 8 --rate 10gbit --schemes "TopK(0.001)"
      sparsewire bench scale --loopback --hosts 2 3 --model transformer
    """

    model: str = option("mnist", _OWN_MODEL, MODELS)
    schemes: tuple[str, ...] = option(
        SCALE_SCHEMES,
        "sparsewire's schemes, measured beside compute alone and dense DDP.",
        "SCHEME",
    )
    hosts: tuple[int, ...] = option(
        (2, 4, 6, 8),
        "Numbers of hosts to measure, each with one worker process.",
        "N",
        limit=at_least(2),
    )
    most: int = option(1024, "Largest number of hosts to model.", "N", limit=between(2, 1 << 20))
    rate: str = option("1gbit", _LINKS, "RATE")
    batch_size: int | None = option(None, _EXAMPLES, "N", usual=_BATCHES, limit=at_least(1))
    rounds: int = option(
        2,
        "Turns per contender at each number of hosts.",
        "N",
        limit=at_least(1),
    )
    steps: int = option(
        8, "Steps measured per turn; fewer where they are slow.", "N", limit=at_least(2)
    )
    out: Path = option(
        Path("runs/bench-scale"),
        "Folder for results.json, report.html, scale.png and scale.svg.",
        "DIR",
    )
