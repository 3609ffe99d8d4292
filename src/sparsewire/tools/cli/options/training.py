"""`train`, `compare` and `demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .declare import POSITIVE, SECONDS, Limit, Output, argument, at_least, between, option

PLACES = "$SPARSEWIRE_DATA/mnist or ./data/mnist"
RACE_PLACES = f"{PLACES}; Python's standard library"
COMPARED = (
    "Dense()",
    "TopK(0.01)",
    "Threshold(0.01)",
    "RandomK(0.01)",
    "BlockRandomK(0.01)",
    "Scheme(TopK(0.01), values=TwoBit())",
)


@dataclass(frozen=True, kw_only=True)
class Training(Output):
    """Options shared by `train` and `compare`: the recipe and how to run it."""

    task: Literal["mnist"] = argument("What to train: mnist.", "TASK")
    workers: int = option(
        4,
        "Local processes to start. Under torchrun, its number of processes is used instead.",
        "N",
        limit=at_least(1),
    )
    epochs: int = option(4, "Passes over the training images.", "N", limit=at_least(1))
    batch_size: int = option(64, "Images per worker and step.", "N", limit=at_least(1))
    lr: float | None = option(
        None, "Learning rate.", "RATE", usual="0.2 for sgd, 0.02 for adagrad", limit=POSITIVE
    )
    momentum: float = option(
        0.0, "Momentum of sgd.", "M", limit=Limit("in [0, 1)", lambda value: 0 <= value < 1)
    )
    optimizer: Literal["sgd", "adagrad"] = option(
        "sgd", "Optimizer that applies the exchanged gradient."
    )
    hidden: tuple[int, ...] = option(
        (256, 256), "Widths of the hidden layers.", "N", limit=at_least(1), may_be_empty=True
    )
    seed: int = option(
        0,
        "Seed of the initial weights and of the order of the images.",
        "N",
        limit=between(0, 2**31 - 1),
    )
    limit: int | None = option(
        None,
        "Train on the first N images only, for a quick try.",
        "N",
        usual="all",
        limit=at_least(1),
    )
    data: Path | None = option(None, "Folder with the four MNIST idx files.", "DIR", usual=PLACES)
    rate: str | None = option(
        None,
        "Run in a lab whose links have this rate, like 1gbit; needs Linux, and root or user "
        "namespaces.",
        "RATE",
        usual="loopback, unshaped",
    )
    port: int | None = option(
        None,
        "TCP port where the workers meet.",
        "PORT",
        usual="free",
        limit=Limit("in 1 to 65535", lambda value: 0 < value < 65536),
    )
    timeout: float = option(
        60.0,
        "How long an exchange may take before the run is aborted.",
        "SECONDS",
        limit=SECONDS,
    )


@dataclass(frozen=True, kw_only=True)
class Train(Training):
    """Train a task with one scheme in real local processes.

    Ctrl-C stops all workers after the same step and saves a checkpoint if --checkpoint is given.
    Under torchrun it runs as one rank and starts no processes.

    examples:
      sparsewire train mnist --scheme "TopK(0.01)" --workers 4
      sparsewire train mnist --scheme "Scheme(TopK(0.01), values=BFloat16())" --metrics run.jsonl
      sparsewire train mnist --epochs 10 --checkpoint runs/topk
      sparsewire train mnist --epochs 10 --checkpoint runs/topk --resume
      sparsewire train mnist --workers 4 --rate 100mbit
      torchrun --nproc-per-node 4 -m sparsewire.tools.cli train mnist --scheme "RandomK(0.05)"
    """

    scheme: str = option(
        "TopK(0.01)", "How gradients are exchanged; `sparsewire list` names the parts.", "SCHEME"
    )
    metrics: Path | None = option(
        None, "Write every record of the run to FILE, one JSON object per line.", "FILE", usual=""
    )
    checkpoint: Path | None = option(
        None,
        "Save the state of all workers in DIR; the last two checkpoints are kept.",
        "DIR",
        usual="",
    )
    checkpoint_every: int | None = option(
        None, "Steps between checkpoints.", "N", usual="one epoch", limit=at_least(1)
    )
    resume: bool = option(False, "Resume from the newest checkpoint in --checkpoint DIR.")


@dataclass(frozen=True, kw_only=True)
class Compare(Training):
    """Train a task with several schemes in turn, print a table and save a plot.

    examples:
      sparsewire compare mnist
      sparsewire compare mnist --schemes "Dense()" "TopK(0.01)" "TopK(0.001)" --out runs/topk
      sparsewire compare mnist --epochs 2 --limit 12000 --json
    """

    schemes: tuple[str, ...] = option(
        COMPARED, "Schemes to compare; the first is the baseline for the others.", "SCHEME"
    )
    out: Path = option(
        Path("runs/compare-mnist"),
        "Folder for report.html, comparison.png, results.json and metrics.jsonl.",
        "DIR",
    )


@dataclass(frozen=True, kw_only=True)
class Demo(Output):
    """See the gain: train on four hosts with slow links, dense and sparse.

    By default a perceptron learns MNIST to 97 % over links of 1 Gbit/s. With --model gpt, a small
    GPT learns the source code of Python's standard library with AdamW over links of 100 Mbit/s.

    The hosts are network namespaces on this machine, which need Linux, and root or user namespaces.
    Without them the workers use loopback, where sparse training sends fewer bytes but is no faster.

    examples:
      sparsewire demo
      sparsewire demo --model gpt
      sparsewire demo --out runs/first --quiet
    """

    model: Literal["mnist", "gpt"] = option(
        "mnist", "What to train: a perceptron on MNIST, or a small GPT with AdamW on text."
    )
    out: Path = option(
        Path("runs/demo"), "Folder for results.json, report.html, train.png and train.svg.", "DIR"
    )
    data: Path | None = option(
        None,
        "Folder with the four MNIST idx files, or a text file for gpt.",
        "PATH",
        usual=RACE_PLACES,
    )
