"""`python -m papers`: what the papers claim, trained and shown beside their numbers.

It needs torch and numpy alone, so that it also runs on machines without the command line's extras.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sparsewire.tools.cli.errors import USAGE, CommandError
from sparsewire.tools.cli.guard import run_guarded

_ABOUT = """Train what a paper claims and print the table beside the paper's numbers.

A study is a grid of trainings, filled cell by cell. Workers are simulated on one device: the same
numbers as real ones. Every finished training is kept in --store, so what is stopped goes on where
it stopped. Table, remarks and picture (PNG and SVG) show all that is on file.

examples:
  python -m papers
  python -m papers aji2017-mnist --quick
  python -m papers aji2017-mnist --only "99/*" --seeds 0 --minutes 10
  python -m papers aji2017-translation --only "*/multi30k/*" --data path/to/texts
  python -m papers eghlidi2020-table1 --only top-k standard --data cifar-10-batches-bin
"""


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as one sentence, as the `sparsewire` command does."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see `{self.prog} --help`)", USAGE)


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    made = _Parser(
        prog="python -m papers",
        usage="%(prog)s [STUDY] [OPTIONS]",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "name",
        nargs="?",
        metavar="STUDY",
        help="the study; without one, all are listed with their claims and how much of each is "
        "done",
    )
    made.add_argument("--list", action="store_true", help="list the studies")
    made.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="how large and how long: one of the recipes that the list shows (default: the study's "
        "first)",
    )
    made.add_argument(
        "--quick",
        action="store_true",
        help="the recipe called quick: small enough for a laptop, and too small to say much",
    )
    made.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="CELL",
        help="train these cells alone: names, words of names, or patterns like 'top-k/*/8' "
        "(default: all)",
    )
    made.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        metavar="N",
        help="seeds of weights, order and random choices; all cells have the first, then the next "
        "(default: the study's)",
    )
    made.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where to train; all workers are simulated there (default: cuda if there is a GPU)",
    )
    made.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder with the data: MNIST's idx files, CIFAR-10's batches, or the folders of both "
        "texts (default: $SPARSEWIRE_DATA/NAME or ./data/NAME)",
    )
    made.add_argument(
        "--download",
        action="store_true",
        help="fetch CIFAR-10 into --data (default: ./data/cifar10) first: 162 MB",
    )
    made.add_argument(
        "--store",
        type=Path,
        metavar="FILE",
        help="file that results are appended to and read from; the picture lies beside it "
        "(default: the study's in papers/)",
    )
    made.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="after the first training, begin none that would not end within M minutes; 0 to train "
        "nothing and show what there is",
    )
    made.add_argument(
        "--beside",
        type=int,
        default=1,
        metavar="N",
        help="trainings that take turns, step by step: together they fill a GPU better (default: "
        "1)",
    )
    made.add_argument("--quiet", action="store_true", help="no progress")
    made.add_argument("--debug", action="store_true", help="show tracebacks")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Train what is missing of a study, and show what there is; without a study, list all.

    Args:
        words: the command line without the program's name; `sys.argv` if not given.

    Returns:
        The exit code: 0, 1 if it failed, 2 if it was asked for wrongly, 130 after Ctrl-C.
    """
    words = sys.argv[1:] if words is None else words
    return run_guarded(lambda: _reproduce(parser().parse_args(words)), words)


def _reproduce(given: argparse.Namespace) -> int:
    from .reproduce import Request, RequestError, run

    if given.quick and given.recipe not in (None, "quick"):
        raise CommandError(
            f"--quick and --recipe {given.recipe} exclude each other: leave one out", USAGE
        )
    request = Request(
        name=None if given.list else given.name,
        recipe="quick" if given.quick else given.recipe,
        only=tuple(given.only),
        seeds=given.seeds and tuple(given.seeds),
        device=given.device,
        data=given.data,
        download=given.download,
        store=given.store,
        minutes=given.minutes,
        beside=given.beside,
        quiet=given.quiet,
    )
    try:
        run(request)
    except RequestError as error:
        raise CommandError(str(error), USAGE) from error
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
