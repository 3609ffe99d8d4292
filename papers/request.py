"""Command-line options of `python -m papers`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparsewire.tools.cli.options.declare import Limit, argument, at_least, option

_ALL_STUDIES = "The study; without one, list all with their claims and how much of each is done."


@dataclass(frozen=True)
class Request:
    """Reproduce a paper's experiment and print the results beside the paper's numbers.

    A study is a grid of trainings, trained cell by cell. Workers are simulated on one device and
    compute the same numbers as real ones. Every finished training is saved in --store, so an
    interrupted run resumes with the missing trainings. The table, remarks and picture (PNG and SVG)
    show all saved results.

    examples:
      python -m papers
      python -m papers aji2017-mnist --quick
      python -m papers aji2017-mnist --only "99/*" --seeds 0 --minutes 10
      python -m papers aji2017-translation --only "*/multi30k/*" --data path/to/texts
      python -m papers eghlidi2020-table1 --only top-k standard --data cifar-10-batches-bin
    """

    name: str | None = argument(_ALL_STUDIES, "STUDY", default=None)
    list: bool = option(False, "List the studies.")
    recipe: str | None = option(
        None,
        "How large and how long: one of the recipes that the list shows.",
        "RECIPE",
        usual="the study's first",
    )
    quick: bool = option(
        False, "The recipe called quick: small enough for a laptop, too small for conclusions."
    )
    only: tuple[str, ...] = option(
        (),
        "Train these cells alone: names, words of names, or patterns like 'top-k/*/8'.",
        "CELL",
        usual="all",
    )
    seeds: tuple[int, ...] | None = option(
        None,
        "Seeds of weights, order and random choices; all cells are trained with the first seed, "
        "then with the next.",
        "N",
        usual="the study's",
    )
    device: Literal["cpu", "cuda"] | None = option(
        None,
        "Where to train; all workers are simulated there.",
        usual="cuda if there is a GPU",
    )
    data: Path | None = option(
        None,
        "Folder with the data: MNIST's idx files, CIFAR-10's batches, or the folders of both "
        "texts.",
        "DIR",
        usual="$SPARSEWIRE_DATA/NAME or ./data/NAME",
    )
    download: bool = option(
        False, "Fetch CIFAR-10 (162 MB) into --data first; without --data, into ./data/cifar10."
    )
    store: Path | None = option(
        None,
        "File that results are appended to and read from; the picture is written beside it.",
        "FILE",
        usual="the study's in papers/",
    )
    minutes: float | None = option(
        None,
        "After the first training, begin none that would not end within M minutes; 0 trains "
        "nothing and shows the results on file.",
        "M",
        usual="no limit",
        limit=Limit("at least 0", lambda value: value >= 0),
    )
    beside: int = option(
        1,
        "Trainings that take turns, step by step: together they use a GPU better.",
        "N",
        limit=at_least(1),
    )
    quiet: bool = option(False, "Show no progress.")
    debug: bool = option(False, "Show tracebacks.")
