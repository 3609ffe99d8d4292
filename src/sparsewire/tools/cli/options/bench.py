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
_OF_MODEL = "by --model"
_OWN_MODEL = "What is trained: one of these, or your own function(rank) that returns (model, loss)."
_SCHEMES = (
    "sparsewire's schemes; 'updates [every H] SCHEME' exchanges updates instead of gradients."
)
_LINKS = "Rate of every host's link, like 1gbit; none leaves links unshaped."
_HOSTS = "Hosts of the network, each with one worker process."
_EXAMPLES = "Examples per host and step; of your own model, how many its batches have."


@dataclass(frozen=True, kw_only=True)
class Bench(Output):
    """What all measurements share."""

    loopback: bool = option(
        False,
        "Measure over 127.0.0.1, where no network of its own can be made; rates do not count.",
    )
    timeout: float = option(
        120.0, "How long a step may take before it counts as hung.", "SECONDS", limit=SECONDS
    )


@dataclass(frozen=True, kw_only=True)
class BenchStep(Bench):
    """Measure what a training step costs with each scheme and each peer, side by side.

    Hosts are network namespaces with links as slow as asked, which needs Linux, and root or user
    namespaces; --loopback does without. All take turns in the same run. The table is printed; a
    report to open in a browser, a picture and every single step as JSON are written to --out.

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
        "What they are measured against, besides compute alone; nothing: DDP without an exchange.",
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
        5, "Turns that each of them takes; the spread is taken over all.", "N", limit=at_least(1)
    )
    steps: int = option(
        5,
        "Steps measured in a turn; those who need a second or more for one take fewer.",
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

    All train the same network from the same weights on the same batches, in turn, until the test
    score is as good as the target: a perceptron on MNIST until 97 % are right, or a small GPT on
    text until the loss is low enough. The clock counts training steps alone. Hosts are network
    namespaces with links as slow as asked, which needs Linux, and root or user namespaces;
    --loopback does without. The table is printed; a report to open in a browser, a picture and the
    curves as JSON are written to --out.

    examples:
      sparsewire bench train
      sparsewire bench train --rate 100mbit --schemes "TopK(0.01)" "TopK(0.001)"
      sparsewire bench train --model gpt --rate 100mbit --peers dense bf16 powersgd-4
      sparsewire bench train --loopback --hosts 2 --hidden 256 --target 0.9
    """

    model: Literal["mnist", "gpt"] = option(
        "mnist", "What is trained: a perceptron on MNIST, or a small GPT on text."
    )
    schemes: tuple[str, ...] | None = option(
        None, _SCHEMES, "SCHEME", usual=_OF_MODEL, may_be_empty=True
    )
    peers: tuple[str, ...] = option(
        ("dense",),
        "What they race against: dense, fp16, bf16, powersgd-1, powersgd-4, nothing.",
        "PEER",
        may_be_empty=True,
    )
    target: float | None = option(
        None,
        "Where a training ends: mnist's test accuracy, between 0 and 1, or gpt's validation loss.",
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
        None, "Which optimizer trains; sgd has momentum 0.9.", usual=_OF_MODEL
    )
    lr: float | None = option(
        None, "Learning rate, the same for all.", "RATE", usual=RACE_RATES, limit=POSITIVE
    )
    evaluate_every: int = option(
        25,
        "Steps between two looks at the test set, for which the clock stops.",
        "N",
        limit=at_least(1),
    )
    limit_steps: int | None = option(
        None,
        "Steps after which a training ends without the target.",
        "N",
        usual=_OF_MODEL,
        limit=at_least(1),
    )
    seed: int = option(
        0,
        "Fixes the initial weights and the order of the images.",
        "N",
        limit=between(0, 2**31 - 1),
    )
    data: Path | None = option(
        None, "The folder with the four MNIST idx files, or gpt's text.", "PATH", usual=RACE_PLACES
    )
    out: Path = option(
        Path("runs/bench-train"),
        "Folder for results.json, report.html, train.png and train.svg.",
        "DIR",
    )


@dataclass(frozen=True, kw_only=True)
class BenchScale(Bench):
    """Measure bytes and time per step against the number of hosts, and model more.

    Compute alone, dense DDP and schemes take turns on networks of each size, like in `bench step`.
    A model is fitted to all of them, its error against each is told, and it says what to expect of
    hosts with cores of their own, up to --most of them. The table is printed; a report to open in a
    browser, a picture and all steps as JSON are written to --out.

    examples:
      sparsewire bench scale
      sparsewire bench scale --hosts 2 4 8 --rate 10gbit --schemes "TopK(0.001)"
      sparsewire bench scale --loopback --hosts 2 3 --model transformer
    """

    model: str = option("mnist", _OWN_MODEL, MODELS)
    schemes: tuple[str, ...] = option(
        SCALE_SCHEMES, "sparsewire's schemes, beside compute alone and dense DDP.", "SCHEME"
    )
    hosts: tuple[int, ...] = option(
        (2, 4, 6, 8),
        "Numbers of hosts to measure, each with one worker process.",
        "N",
        limit=at_least(2),
    )
    most: int = option(
        1024, "Number of hosts up to which the model goes.", "N", limit=between(2, 1 << 20)
    )
    rate: str = option("1gbit", _LINKS, "RATE")
    batch_size: int | None = option(None, _EXAMPLES, "N", usual=_BATCHES, limit=at_least(1))
    rounds: int = option(
        2,
        "Turns that each of them takes at each number of hosts.",
        "N",
        limit=at_least(1),
    )
    steps: int = option(
        8, "Steps measured in a turn; slow ones take fewer.", "N", limit=at_least(2)
    )
    out: Path = option(
        Path("runs/bench-scale"),
        "Folder for results.json, report.html, scale.png and scale.svg.",
        "DIR",
    )
