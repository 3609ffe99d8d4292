"""`reproduce`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

_FIRST_RECIPE = "(default: the study's first)"
_ALL = "(default: all)"
_STUDY_SEEDS = "(default: the study's)"
_GPU = "(default: cuda if there is a GPU)"
_ANY_DATA = "(default: $SPARSEWIRE_DATA/NAME or ./data/NAME)"
_STORE = "(default: the study's in papers/)"

REPRODUCE = """Train what a paper claims and print the table beside the paper's numbers.

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
    """After the first training, begin none that would not end within M minutes; 0 to train nothing
    and show what there is."""
    beside: Annotated[int, arg(metavar="N")] = 1
    """Trainings that take turns, step by step: together they fill a GPU better."""
    quiet: bool = False
    """No progress."""
    debug: bool = False
    """Show tracebacks."""
