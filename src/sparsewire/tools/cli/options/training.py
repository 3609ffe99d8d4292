"""`train`, `compare` and `demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from .common import PLACES, RACE_PLACES, SchemeText

_RATES = "(default: 0.2 for sgd, 0.02 for adagrad)"
_LOOPBACK = "(default: loopback, as fast as it goes)"
_EPOCH = "(default: one epoch)"
COMPARED = (
    "Dense()",
    "TopK(0.01)",
    "Threshold(0.01)",
    "RandomK(0.01)",
    "BlockRandomK(0.01)",
    "Scheme(TopK(0.01), values=TwoBit())",
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What `train` and `compare` share: the recipe, and how it is run."""

    workers: Annotated[int, arg(metavar="N")] = 4
    """Local processes to start. Started by torchrun, its number of processes counts instead."""
    epochs: Annotated[int, arg(metavar="N")] = 4
    """Passes over the training images."""
    batch_size: Annotated[int, arg(metavar="N")] = 64
    """Images per worker and step."""
    lr: Annotated[float | None, arg(metavar="RATE", help_behavior_hint=_RATES)] = None
    """Learning rate."""
    momentum: Annotated[float, arg(metavar="M")] = 0.0
    """Momentum of sgd."""
    optimizer: Literal["sgd", "adagrad"] = "sgd"
    """Which optimizer applies the exchanged gradient."""
    hidden: Annotated[tuple[int, ...], arg(metavar="N [N ...]")] = (256, 256)
    """Widths of the hidden layers."""
    seed: Annotated[int, arg(metavar="N")] = 0
    """Fixes the initial weights and the order of the images."""
    limit: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all)")] = None
    """Train on the first N images only, for a quick try."""
    data: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint=PLACES)] = None
    """Folder with the four MNIST idx files."""
    rate: Annotated[str | None, arg(metavar="RATE", help_behavior_hint=_LOOPBACK)] = None
    """Run on a network of its own whose links have this rate, like 1gbit; needs Linux, and root or
    user namespaces."""
    port: Annotated[int | None, arg(metavar="PORT", help_behavior_hint="(default: free)")] = None
    """TCP port where the workers meet."""
    timeout: Annotated[float, arg(metavar="SECONDS")] = 60.0
    """How long an exchange may take before the run is given up."""
    json: bool = False
    """Print the result as JSON on standard output."""
    quiet: bool = False
    """No progress."""
    debug: bool = False
    """Show tracebacks and what the workers print."""


TRAIN = """Train a task with one scheme in real local processes.

Ctrl-C stops all workers after the same step and saves a checkpoint if --checkpoint is given.
Started by torchrun, it takes part as that rank instead of starting processes.

examples:
  sparsewire train mnist --scheme "TopK(0.01)" --workers 4
  sparsewire train mnist --scheme "Scheme(TopK(0.01), values=BFloat16())" --metrics run.jsonl
  sparsewire train mnist --epochs 10 --checkpoint runs/topk
  sparsewire train mnist --epochs 10 --checkpoint runs/topk --resume
  sparsewire train mnist --workers 4 --rate 100mbit
  torchrun --nproc-per-node 4 -m sparsewire.tools.cli train mnist --scheme "RandomK(0.05)"
"""


@dataclass(frozen=True, kw_only=True)
class Train(Training):
    """Train a task with one scheme in real local processes."""

    task: Positional[Literal["mnist"]]
    """What to train."""
    scheme: SchemeText = "TopK(0.01)"
    """How gradients are exchanged; `sparsewire list` names the parts."""
    metrics: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write every record of the run to FILE, one JSON object a line."""
    checkpoint: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Save the state of all workers in DIR; the last two checkpoints are kept."""
    checkpoint_every: Annotated[int | None, arg(metavar="N", help_behavior_hint=_EPOCH)] = None
    """Steps between checkpoints."""
    resume: bool = False
    """Go on from the newest checkpoint in --checkpoint DIR."""


COMPARE = """Train a task with several schemes in turn, print a table and save a plot.

examples:
  sparsewire compare mnist
  sparsewire compare mnist --schemes "Dense()" "TopK(0.01)" "TopK(0.001)" --out runs/topk
  sparsewire compare mnist --epochs 2 --limit 12000 --json
"""


@dataclass(frozen=True, kw_only=True)
class Compare(Training):
    """Train a task with several schemes in turn and compare them."""

    task: Positional[Literal["mnist"]]
    """What to train."""
    schemes: Annotated[tuple[str, ...], arg(metavar="SCHEME [SCHEME ...]")] = COMPARED
    """The schemes; the first is what the others are measured against."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("runs/compare-mnist")
    """Folder for comparison.png, results.json and metrics.jsonl."""


DEMO = """See the gain: a training on four hosts with slow links, dense against sparse.

It is MNIST to 97 % with links of 1 Gbit/s, or a small GPT with AdamW and links of 100 Mbit/s, which
learns the source code of Python's standard library.

The hosts are network namespaces of this machine, joined by links that slow. That needs Linux, and
root or user namespaces; else the workers talk over loopback, and what you see is fewer bytes.

examples:
  sparsewire demo
  sparsewire demo --model gpt
  sparsewire demo --out runs/first --quiet
"""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """See the gain: a training on four hosts with slow links, dense against sparse."""

    model: Literal["mnist", "gpt"] = "mnist"
    """What is trained: a perceptron on MNIST, or a small GPT with AdamW on text."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("runs/demo")
    """Folder for results.json, report.html, train.png and train.svg."""
    data: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint=RACE_PLACES)] = None
    """The folder with the four MNIST idx files, or gpt's text."""
    json: bool = False
    """Print the result as JSON on standard output."""
    quiet: bool = False
    """No progress."""
    debug: bool = False
    """Show tracebacks and what the workers print."""
