"""`python -m sparsewire.papers` is `sparsewire reproduce` for machines that have torch alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import SparsewireError
from .reproduce import Request, run


def main() -> int:
    """Read the command line and reproduce what it names."""
    parser = argparse.ArgumentParser(prog="python -m sparsewire.papers", description=__doc__)
    parser.add_argument("name", nargs="?", help="the study; without it they are listed")
    parser.add_argument("--recipe", help="how long and how large (default: the study's first)")
    parser.add_argument("--quick", action="store_const", const="quick", dest="recipe")
    parser.add_argument("--only", nargs="+", default=[], metavar="CELL")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--data", type=Path, metavar="DIR")
    parser.add_argument("--download", action="store_true")
    parser.add_argument("--store", type=Path, metavar="FILE")
    parser.add_argument("--minutes", type=float, metavar="M")
    parser.add_argument("--beside", type=int, default=1, metavar="N")
    parser.add_argument("--quiet", action="store_true")
    given = vars(parser.parse_args())
    given["only"] = tuple(given["only"])
    given["seeds"] = given["seeds"] and tuple(given["seeds"])
    try:
        run(Request(**given))
    except SparsewireError as error:
        print(f"sparsewire: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
