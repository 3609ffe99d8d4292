"""`python -m papers`: what the papers claim, trained and shown beside their numbers.

It needs torch and numpy alone, so that it also runs on machines without the command line's extras.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from sparsewire.tools.cli.errors import USAGE, CommandError, run_guarded
from sparsewire.tools.cli.parse import read

from .request import Request


def main(words: Sequence[str] | None = None) -> int:
    """Train what is missing of a study, and show what there is; without a study, list all.

    Args:
        words: the command line without the program's name; `sys.argv` if not given.

    Returns:
        The exit code: 0, 1 if it failed, 2 if it was asked for wrongly, 130 after Ctrl-C.
    """
    words = sys.argv[1:] if words is None else words
    return run_guarded(lambda: _reproduce(read(Request, "python -m papers", words)), words)


def _reproduce(request: Request) -> int:
    from .reproduce import RequestError, run

    if request.quick:
        if request.recipe not in (None, "quick"):
            raise CommandError(
                f"--quick and --recipe {request.recipe} exclude each other: leave one out", USAGE
            )
        request = replace(request, recipe="quick")
    if request.list:
        request = replace(request, name=None)
    try:
        run(request)
    except RequestError as error:
        raise CommandError(str(error), USAGE) from error
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
