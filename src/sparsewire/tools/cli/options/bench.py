"""`bench step`, `bench train` and `bench scale`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from .common import MODELS, RACE_PLACES

_ALL_PEERS = "(default: dense fp16 bf16 powersgd-1 powersgd-4)"
_BATCHES = "(default: 40 for mnist, 16 for resnet18, 8 for transformer)"
RACE_RATES = "(default: 0.005 for adagrad, 0.05 for sgd, 0.002 for adamw)"
_OF_MODEL = "(default: by --model)"
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

BENCH_STEP = """Measure what a training step costs with each scheme and each peer, side by side.

Hosts are network namespaces with links as slow as asked, which needs Linux, and root or user
namespaces; --loopback does without. All take turns in the same run. The table is printed; a report
to open in a browser, a picture and every single step as JSON are written to --out.

examples:
  sparsewire bench step --model resnet18 --rate 1gbit
  sparsewire bench step --rates 100mbit 1gbit 10gbit none --out runs/rates
  sparsewire bench step --loopback --hosts 2 --model transformer --peers dense
  sparsewire bench step --schemes "TopK(0.01)" "updates TopK(0.01)"
  sparsewire bench step --model my_models:small --schemes "TopK(0.001)" --batch-size 32
"""


@dataclass(frozen=True, kw_only=True)
class BenchStep:
    """Measure what a training step costs with each scheme and each peer."""

    model: Annotated[str, arg(metavar=MODELS)] = "mnist"
    """What is trained: one of these, or your own function(rank) that returns (model, loss)."""
    schemes: Annotated[tuple[str, ...], arg(metavar="SCHEME [SCHEME ...]")] = BENCH_SCHEMES
    """sparsewire's schemes; 'updates [every H] SCHEME' exchanges updates instead of gradients."""
    peers: Annotated[
        tuple[str, ...], arg(metavar="PEER [PEER ...]", help_behavior_hint=_ALL_PEERS)
    ] = PEERS
    """What they are measured against, besides compute alone; nothing: DDP without an exchange."""
    hosts: Annotated[int, arg(metavar="N")] = 4
    """Hosts of the network, each with one worker process."""
    rates: Annotated[tuple[str, ...], arg(metavar="RATE [RATE ...]", aliases=("--rate",))] = (
        "1gbit",
    )
    """Rates of every host's link, like 1gbit, each measured in turn; none leaves links unshaped."""
    loopback: bool = False
    """Measure over 127.0.0.1, where no network of its own can be made: --rates does not count."""
    batch_size: Annotated[int | None, arg(metavar="N", help_behavior_hint=_BATCHES)] = None
    """Examples per host and step; of your own model, how many its batches have."""
    rounds: Annotated[int, arg(metavar="N")] = 5
    """Turns that each of them takes; the spread is taken over all."""
    steps: Annotated[int, arg(metavar="N")] = 5
    """Steps measured in a turn; those who need a second or more for one take fewer."""
    timeout: Annotated[float, arg(metavar="SECONDS")] = 120.0
    """How long a step may take before it counts as hung."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("runs/bench-step")
    """Folder for results.json, report.html, step.png and step.svg."""
    json: bool = False
    """Print the results as JSON on standard output."""
    quiet: bool = False
    """No progress."""
    debug: bool = False
    """Show tracebacks and what the workers print."""


BENCH_TRAIN = """Measure how long training takes to a target, dense and sparse.

All train the same network from the same weights on the same batches, in turn, until the test score
is as good as the target: a perceptron on MNIST until 97 % are right, or a small GPT on text until
the loss is low enough. The clock counts training steps alone. Hosts are network namespaces with
links as slow as asked, which needs Linux, and root or user namespaces; --loopback does without. The
table is printed; a report to open in a browser, a picture and the curves as JSON are written to
--out.

examples:
  sparsewire bench train
  sparsewire bench train --rate 100mbit --schemes "TopK(0.01)" "TopK(0.001)"
  sparsewire bench train --model gpt --rate 100mbit --peers dense bf16 powersgd-4
  sparsewire bench train --loopback --hosts 2 --hidden 256 --target 0.9
"""


@dataclass(frozen=True, kw_only=True)
class BenchTrain:
    """Measure how long training takes to a target, dense and sparse."""

    model: Literal["mnist", "gpt"] = "mnist"
    """What is trained: a perceptron on MNIST, or a small GPT on text."""
    schemes: Annotated[
        tuple[str, ...] | None, arg(metavar="SCHEME [SCHEME ...]", help_behavior_hint=_OF_MODEL)
    ] = None
    """sparsewire's schemes; 'updates [every H] SCHEME' exchanges updates instead of gradients."""
    peers: Annotated[tuple[str, ...], arg(metavar="PEER [PEER ...]")] = ("dense",)
    """What they race against: dense, fp16, bf16, powersgd-1, powersgd-4, nothing."""
    target: Annotated[float | None, arg(metavar="SCORE", help_behavior_hint=_OF_MODEL)] = None
    """Where a training ends: mnist's test accuracy, between 0 and 1, or gpt's validation loss."""
    hosts: Annotated[int, arg(metavar="N")] = 4
    """Hosts of the network, each with one worker process."""
    rate: Annotated[str, arg(metavar="RATE")] = "1gbit"
    """Rate of every host's link, like 1gbit; none leaves links unshaped."""
    loopback: bool = False
    """Measure over 127.0.0.1, where no network of its own can be made: --rate does not count."""
    batch_size: Annotated[int | None, arg(metavar="N", help_behavior_hint=_OF_MODEL)] = None
    """Images, or windows of text, per host and step."""
    hidden: Annotated[tuple[int, ...], arg(metavar="N [N ...]", help_behavior_hint=_OF_MODEL)] = ()
    """Widths of the hidden layers."""
    optimizer: Annotated[
        Literal["adagrad", "sgd", "adamw"] | None, arg(help_behavior_hint=_OF_MODEL)
    ] = None
    """Which optimizer trains; sgd has momentum 0.9."""
    lr: Annotated[float | None, arg(metavar="RATE", help_behavior_hint=RACE_RATES)] = None
    """Learning rate, the same for all."""
    evaluate_every: Annotated[int, arg(metavar="N")] = 25
    """Steps between two looks at the test set, for which the clock stops."""
    limit_steps: Annotated[int | None, arg(metavar="N", help_behavior_hint=_OF_MODEL)] = None
    """Steps after which a training ends without the target."""
    seed: Annotated[int, arg(metavar="N")] = 0
    """Fixes the initial weights and the order of the images."""
    data: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint=RACE_PLACES)] = None
    """The folder with the four MNIST idx files, or gpt's text."""
    timeout: Annotated[float, arg(metavar="SECONDS")] = 120.0
    """How long a step may take before it counts as hung."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("runs/bench-train")
    """Folder for results.json, report.html, train.png and train.svg."""
    json: bool = False
    """Print the results as JSON on standard output."""
    quiet: bool = False
    """No progress."""
    debug: bool = False
    """Show tracebacks and what the workers print."""


BENCH_SCALE = """Measure bytes and time per step against the number of hosts, and model more.

Compute alone, dense DDP and schemes take turns on networks of each size, like in `bench step`. A
model is fitted to all of them, its error against each is told, and it says what to expect of hosts
with cores of their own, up to --most of them. The table is printed; a report to open in a browser,
a picture and all steps as JSON are written to --out.

examples:
  sparsewire bench scale
  sparsewire bench scale --hosts 2 4 8 --rate 10gbit --schemes "TopK(0.001)"
  sparsewire bench scale --loopback --hosts 2 3 --model transformer
"""


@dataclass(frozen=True, kw_only=True)
class BenchScale:
    """Measure bytes and time per step against the number of hosts, and model more."""

    model: Annotated[str, arg(metavar=MODELS)] = "mnist"
    """What is trained: one of these, or your own function(rank) that returns (model, loss)."""
    schemes: Annotated[tuple[str, ...], arg(metavar="SCHEME [SCHEME ...]")] = SCALE_SCHEMES
    """sparsewire's schemes, beside compute alone and dense DDP."""
    hosts: Annotated[tuple[int, ...], arg(metavar="N [N ...]")] = (2, 4, 6, 8)
    """Numbers of hosts to measure, each with one worker process."""
    most: Annotated[int, arg(metavar="N")] = 1024
    """Number of hosts up to which the model goes."""
    rate: Annotated[str, arg(metavar="RATE")] = "1gbit"
    """Rate of every host's link, like 1gbit; none leaves links unshaped."""
    loopback: bool = False
    """Measure over 127.0.0.1, where no network of its own can be made: --rate does not count."""
    batch_size: Annotated[int | None, arg(metavar="N", help_behavior_hint=_BATCHES)] = None
    """Examples per host and step; of your own model, how many its batches have."""
    rounds: Annotated[int, arg(metavar="N")] = 2
    """Turns that each of them takes at each number of hosts."""
    steps: Annotated[int, arg(metavar="N")] = 8
    """Steps measured in a turn; slow ones take fewer."""
    timeout: Annotated[float, arg(metavar="SECONDS")] = 120.0
    """How long a step may take before it counts as hung."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("runs/bench-scale")
    """Folder for results.json, report.html, scale.png and scale.svg."""
    json: bool = False
    """Print the results as JSON on standard output."""
    quiet: bool = False
    """No progress."""
    debug: bool = False
    """Show tracebacks and what the workers print."""
