"""The commands and their flags, as dataclasses that tyro turns into a command line.

Nothing here imports torch, so that `--help` answers at once. What the flags mean together
is checked in `plan.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, Suppress, UseAppendAction, arg

# Hints replace tyro's "(default: None)" where leaving the flag out means something.
_RATES = "(default: 0.2 for sgd, 0.02 for adagrad)"
_PLACES = "(default: $SPARSEWIRE_DATA/mnist or ./data/mnist)"
_LOOPBACK = "(default: loopback, as fast as it goes)"
_EPOCH = "(default: one epoch)"
_LOGS = "(default: a new folder in ./runs)"
_UNSHAPED = "(default: not shaped)"
_ALL_PEERS = "(default: dense fp16 bf16 powersgd-1 powersgd-4)"
_BATCHES = "(default: 40 for mnist, 16 for resnet18, 8 for transformer)"
_RACE_RATES = "(default: 0.005 for adagrad, 0.05 for sgd)"
_FIRST_RECIPE = "(default: the study's first)"
_ALL = "(default: all)"
_STUDY_SEEDS = "(default: the study's)"
_GPU = "(default: cuda if there is a GPU)"
_ANY_DATA = "(default: $SPARSEWIRE_DATA/NAME or ./data/NAME)"
_STORE = "(default: the study's in papers/)"
SchemeText = Annotated[str, arg(metavar="SCHEME")]

COMPARED = (
    "Dense()",
    "TopK(0.01)",
    "Threshold(0.01)",
    "RandomK(0.01)",
    "BlockRandomK(0.01)",
    "Scheme(TopK(0.01), values=TwoBit())",
)
BENCH_SCHEMES = (
    "TopK(0.01)",
    "Threshold(0.01)",
    "Scheme(TopK(0.01), values=TwoBit())",
    "BlockRandomK(0.01)",
)
RACE_SCHEMES = ("TopK(0.01)", "Threshold(0.01)")
SCALE_SCHEMES = (
    "TopK(0.01)",
    "Scheme(TopK(0.01), collective=Sharded())",
    "Scheme(TopK(0.01), values=TwoBit())",
    "Scheme(TopK(0.01), values=TwoBit(), collective=Sharded())",
)
PEERS = ("dense", "fp16", "bf16", "powersgd-1", "powersgd-4")


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
    data: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint=_PLACES)] = None
    """Folder with the four MNIST idx files."""
    rate: Annotated[str | None, arg(metavar="RATE", help_behavior_hint=_LOOPBACK)] = None
    """Run on a network of its own whose links have this rate, like 1gbit; needs Linux and root."""
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


@dataclass(frozen=True, kw_only=True)
class Compare(Training):
    """Train a task with several schemes in turn and compare them."""

    task: Positional[Literal["mnist"]]
    """What to train."""
    schemes: Annotated[tuple[str, ...], arg(metavar="SCHEME [SCHEME ...]")] = COMPARED
    """The schemes; the first is what the others are measured against."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("runs/compare-mnist")
    """Folder for comparison.png, results.json and metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """See the gain: MNIST to 97 % on four hosts with links of 1 Gbit/s, dense against sparse."""

    out: Annotated[Path, arg(metavar="DIR")] = Path("runs/demo")
    """Folder for results.json, report.html, train.png and train.svg."""
    data: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint=_PLACES)] = None
    """Folder with the four MNIST idx files."""
    json: bool = False
    """Print the result as JSON on standard output."""
    quiet: bool = False
    """No progress."""
    debug: bool = False
    """Show tracebacks and what the workers print."""


@dataclass(frozen=True, kw_only=True)
class List:
    """List the families of parts that a scheme is made of."""

    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Say what a scheme sends, and how, without training anything."""

    scheme: Positional[SchemeText]
    """The scheme to explain."""
    params: Annotated[float, arg(metavar="N", help_behavior_hint="(default: 11e6)")] = 11e6
    """Number of parameters, taken as one matrix."""
    model: Annotated[Literal["mnist"] | None, arg(metavar="{mnist}", help_behavior_hint="")] = None
    """Explain for this task's model instead, with all its layers."""
    hidden: Annotated[tuple[int, ...], arg(metavar="N [N ...]")] = (256, 256)
    """Widths of the hidden layers of --model mnist."""
    workers: Annotated[int, arg(metavar="N")] = 8
    """How many workers exchange."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Run a command on a cluster of shaped network namespaces on this machine."""

    hosts: Annotated[int, arg(metavar="N")] = 4
    """How many hosts, each of which runs one rank."""
    rate: Annotated[
        UseAppendAction[tuple[str, ...]],
        arg(metavar="[HOST=]RATE", help_behavior_hint=_UNSHAPED),
    ] = ()
    """How fast links are, both ways, like 1gbit or 100mbit. Repeat it as HOST=RATE for hosts whose
    link is another."""
    oversubscribe: Annotated[float, arg(metavar="FACTOR")] = 1.0
    """Above 1: put the hosts into two racks, and let the link between them carry what the hosts of
    one can send, divided by this."""
    check: Annotated[bool, arg(help_behavior_hint="")] = True
    """Do not measure the links before the command runs."""
    logs: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint=_LOGS)] = None
    """Folder for what the ranks print: rank-0.log and so on."""
    loopback: bool = False
    """No lab: run the ranks over 127.0.0.1, not shaped, where there is no root or no Linux."""
    set: Annotated[
        UseAppendAction[tuple[str, ...]], arg(metavar="[HOST=]RATE", help_behavior_hint="")
    ] = ()
    """Change the rate of a lab that runs already, and leave."""
    lab: Annotated[str | None, arg(metavar="ID", help_behavior_hint="(default: the only one)")] = (
        None
    )
    """Which lab --set is for."""
    debug: bool = False
    """Show tracebacks."""
    command: Suppress[tuple[str, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class BenchStep:
    """Measure what a training step costs with each scheme and each peer."""

    model: Annotated[str, arg(metavar="{mnist,resnet18,transformer,MODULE:FUNCTION}")] = "mnist"
    """What is trained: one of these, or your own function(rank) that returns (model, loss)."""
    schemes: Annotated[tuple[str, ...], arg(metavar="SCHEME [SCHEME ...]")] = BENCH_SCHEMES
    """sparsewire's schemes."""
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
    """Do without a network of its own, which needs Linux and root: --rates does not count then."""
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


@dataclass(frozen=True, kw_only=True)
class BenchTrain:
    """Measure how long training takes to a target accuracy, dense and sparse."""

    schemes: Annotated[tuple[str, ...], arg(metavar="SCHEME [SCHEME ...]")] = RACE_SCHEMES
    """sparsewire's schemes."""
    peers: Annotated[tuple[str, ...], arg(metavar="PEER [PEER ...]")] = ("dense",)
    """What they race against: dense, fp16, bf16, powersgd-1, powersgd-4, nothing."""
    target: Annotated[float, arg(metavar="ACCURACY")] = 0.97
    """The test accuracy at which a training ends, between 0 and 1."""
    hosts: Annotated[int, arg(metavar="N")] = 4
    """Hosts of the network, each with one worker process."""
    rate: Annotated[str, arg(metavar="RATE")] = "1gbit"
    """Rate of every host's link, like 1gbit; none leaves links unshaped."""
    loopback: bool = False
    """Do without a network of its own, which needs Linux and root: --rate does not count then."""
    batch_size: Annotated[int, arg(metavar="N")] = 40
    """Images per host and step."""
    hidden: Annotated[tuple[int, ...], arg(metavar="N [N ...]")] = (4096, 4096, 4096)
    """Widths of the hidden layers."""
    optimizer: Literal["adagrad", "sgd"] = "adagrad"
    """Which optimizer applies the exchanged gradient; sgd has momentum 0.9."""
    lr: Annotated[float | None, arg(metavar="RATE", help_behavior_hint=_RACE_RATES)] = None
    """Learning rate, the same for all."""
    evaluate_every: Annotated[int, arg(metavar="N")] = 25
    """Steps between two looks at the test set, for which the clock stops."""
    limit_steps: Annotated[int, arg(metavar="N")] = 400
    """Steps after which a training ends without the target."""
    seed: Annotated[int, arg(metavar="N")] = 0
    """Fixes the initial weights and the order of the images."""
    data: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint=_PLACES)] = None
    """Folder with the four MNIST idx files."""
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


@dataclass(frozen=True, kw_only=True)
class BenchScale:
    """Measure bytes and time per step against the number of hosts, and model more."""

    model: Annotated[str, arg(metavar="{mnist,resnet18,transformer,MODULE:FUNCTION}")] = "mnist"
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
    """Do without a network of its own, which needs Linux and root: --rate does not count then."""
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


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Train what a paper claims and print the table beside the paper's numbers."""

    name: Positional[Annotated[str | None, arg(metavar="STUDY", help_behavior_hint="")]] = None
    """The study; without one, all are listed with their claims and how much of each is done."""
    list: bool = False
    """List the studies."""
    recipe: Annotated[str | None, arg(metavar="RECIPE", help_behavior_hint=_FIRST_RECIPE)] = None
    """How large and how long: one of the recipes that the list shows."""
    quick: bool = False
    """The recipe called quick: small enough for a laptop, and too small to say much."""
    only: Annotated[tuple[str, ...], arg(metavar="CELL [CELL ...]", help_behavior_hint=_ALL)] = ()
    """Train these cells alone: names, words of names, or patterns like 'top-k/*/8'."""
    seeds: Annotated[
        tuple[int, ...] | None, arg(metavar="N [N ...]", help_behavior_hint=_STUDY_SEEDS)
    ] = None
    """Seeds of weights, order and random choices; all cells have the first, then the next."""
    device: Annotated[
        Literal["cpu", "cuda"] | None, arg(metavar="{cpu,cuda}", help_behavior_hint=_GPU)
    ] = None
    """Where to train; all workers are simulated there."""
    data: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint=_ANY_DATA)] = None
    """Folder with the data: MNIST's idx files, CIFAR-10's batches, or the folders of both texts."""
    download: bool = False
    """Fetch CIFAR-10 into --data (default: ./data/cifar10) first: 162 MB."""
    store: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint=_STORE)] = None
    """File that results are appended to and read from; the picture lies beside it."""
    minutes: Annotated[float | None, arg(metavar="M", help_behavior_hint="")] = None
    """Begin no training that would not end within M minutes; 0 to show what there is."""
    beside: Annotated[int, arg(metavar="N")] = 1
    """Trainings that take turns, step by step: together they fill a GPU better."""
    quiet: bool = False
    """No progress."""
    debug: bool = False
    """Show tracebacks."""


_DEMO = """See the gain: MNIST to 97 % on four hosts with links of 1 Gbit/s, dense against sparse.

On Linux as root the hosts are network namespaces of this machine, joined by links that slow; else
the workers talk over loopback, and what you see is fewer bytes.

examples:
  sparsewire demo
  sparsewire demo --out runs/first --quiet
"""

_TRAIN = """Train a task with one scheme in real local processes.

Ctrl-C stops all workers after the same step and saves a checkpoint if --checkpoint is given.
Started by torchrun, it takes part as that rank instead of starting processes.

examples:
  sparsewire train mnist --scheme "TopK(0.01)" --workers 4
  sparsewire train mnist --scheme "Scheme(TopK(0.01), values=BFloat16())" --metrics run.jsonl
  sparsewire train mnist --epochs 10 --checkpoint runs/topk
  sparsewire train mnist --epochs 10 --checkpoint runs/topk --resume
  sparsewire train mnist --workers 4 --rate 100mbit
  torchrun --nproc-per-node 4 -m sparsewire.cli train mnist --scheme "RandomK(0.05)"
"""

_COMPARE = """Train a task with several schemes in turn, print a table and save a plot.

examples:
  sparsewire compare mnist
  sparsewire compare mnist --schemes "Dense()" "TopK(0.01)" "TopK(0.001)" --out runs/topk
  sparsewire compare mnist --epochs 2 --limit 12000 --json
"""

_LIST = """List the families of parts that a scheme is made of, each part with one line.

examples:
  sparsewire list
  sparsewire list --json
"""

_EXPLAIN = """Say what a scheme sends, and how, without training anything.

examples:
  sparsewire explain "TopK(0.01)" --params 11e6 --workers 8
  sparsewire explain "Scheme(TopK(0.01), scope='global')" --model mnist --json
"""

_LAB = """Run a command on a cluster of shaped network namespaces on this machine.

  sparsewire lab [OPTIONS] -- COMMAND [ARGUMENTS]

Every host runs COMMAND once, as one rank, with the variables that torchrun would set. Rank 0's
output is shown, everybody's is logged. The links are measured first; without COMMAND that is all.
When a rank fails, the others are stopped. Ctrl-C is passed on to all ranks; a second one kills
them. Root, `ip` and `tc` are needed; --loopback does without them, and without shaping.

examples:
  sparsewire lab --hosts 4 --rate 1gbit -- sparsewire train mnist --scheme "TopK(0.01)"
  sparsewire lab --hosts 4 --rate 1gbit -- python train.py
  sparsewire lab --hosts 8 --rate 10gbit --rate 0=100mbit --oversubscribe 4 -- python train.py
  sparsewire lab --hosts 2 --rate 2.5gbit
  sparsewire lab --set 100mbit
  sparsewire lab --set 0=50mbit
"""

_BENCH_STEP = """Measure what a training step costs with each scheme and each peer, side by side.

Hosts are network namespaces with links as slow as asked, which needs Linux and root; --loopback
does without. All take turns in the same run. The table is printed; a report to open in a browser,
a picture and every single step as JSON are written to --out.

examples:
  sparsewire bench step --model resnet18 --rate 1gbit
  sparsewire bench step --rates 100mbit 1gbit 10gbit none --out runs/rates
  sparsewire bench step --loopback --hosts 2 --model transformer --peers dense
  sparsewire bench step --model my_models:small --schemes "TopK(0.001)" --batch-size 32
"""

_BENCH_TRAIN = """Measure how long training takes to a target accuracy, dense and sparse.

All train the same perceptron on MNIST from the same weights on the same batches, in turn, until
the test accuracy is there. The clock counts training steps alone. Hosts are network namespaces with
links as slow as asked, which needs Linux and root; --loopback does without. The table is printed;
a report to open in a browser, a picture and the curves as JSON are written to --out.

examples:
  sparsewire bench train
  sparsewire bench train --rate 100mbit --schemes "TopK(0.01)" "TopK(0.001)"
  sparsewire bench train --loopback --hosts 2 --hidden 256 --target 0.9
"""

_BENCH_SCALE = """Measure bytes and time per step against the number of hosts, and model more.

Compute alone, dense DDP and schemes take turns on networks of each size, like in `bench step`. A
model is fitted to all of them, its error against each is told, and it says what to expect of hosts
with cores of their own, up to --most of them. The table is printed; a report to open in a browser,
a picture and all steps as JSON are written to --out.

examples:
  sparsewire bench scale
  sparsewire bench scale --hosts 2 4 8 --rate 10gbit --schemes "TopK(0.001)"
  sparsewire bench scale --loopback --hosts 2 3 --model transformer
"""

_REPRODUCE = """Train what a paper claims and print the table beside the paper's numbers.

A study is a grid of trainings, filled cell by cell. Workers are simulated on one device: the same
numbers as real ones. Every finished training is kept in --store, so what is stopped goes on where
it stopped. Table, remarks and picture (PNG and SVG) show all that is on file.

examples:
  sparsewire reproduce
  sparsewire reproduce aji2017-mnist --quick
  sparsewire reproduce aji2017-mnist --only "99/*" --seeds 0 --minutes 10
  sparsewire reproduce aji2017-translation --only "*/multi30k/*" --data path/to/texts
  sparsewire reproduce eghlidi2020-table1 --only top-k standard --data cifar-10-batches-bin
"""

Command = (
    Demo | Train | Compare | List | Explain | Lab | BenchStep | BenchTrain | BenchScale | Reproduce
)
COMMANDS: dict[str, tuple[type[Command], str]] = {
    "demo": (Demo, _DEMO),
    "train": (Train, _TRAIN),
    "compare": (Compare, _COMPARE),
    "list": (List, _LIST),
    "explain": (Explain, _EXPLAIN),
    "lab": (Lab, _LAB),
    "bench step": (BenchStep, _BENCH_STEP),
    "bench train": (BenchTrain, _BENCH_TRAIN),
    "bench scale": (BenchScale, _BENCH_SCALE),
    "reproduce": (Reproduce, _REPRODUCE),
}
GROUPS = {"bench": "Measure what training costs, on networks as slow as you like."}
"""Commands that only say which others there are; those have two words."""
