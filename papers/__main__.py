"""`python -m papers`: reproduce the papers' experiments and compare with their published numbers.

Requires only torch and numpy, so it also runs without the extras of the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from sparsewire.tools.cli.errors import USAGE, CommandError, run_guarded
from sparsewire.tools.cli.parse import read

from .request import Request


def main(words: Sequence[str] | None = None) -> int:
    """Train the missing cells of a study and show its results; without a study, list all.

    Args:
        words: the command line without the program's name; `sys.argv` if not given.

    Returns:
        The exit code: 0 on success, 1 on failure, 2 for wrong usage, 130 after Ctrl-C.
    """
    words = sys.argv[1:] if words is None else words
    return run_guarded(lambda: _reproduce(read(Request, "python -m papers", words)), words)


def _reproduce(request: Request) -> int:
    from .reproduce import run

    if request.quick:
        if request.recipe not in (None, "quick"):
            raise CommandError(
                f"--quick and --recipe {request.recipe} exclude each other: leave one out", USAGE
            )
        request = replace(request, recipe="quick")
    if request.list:
        request = replace(request, name=None)
    run(request)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
