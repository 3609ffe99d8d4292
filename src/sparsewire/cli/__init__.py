"""The command line: `sparsewire train`, `compare`, `list`, `explain`, `lab`, `bench`, `reproduce`.

Importing this imports neither torch nor tyro; each command imports what it needs when it runs.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from .errors import FAILED, USAGE, CommandError, explain_os_error

if TYPE_CHECKING:
    from .options import Command

__all__ = ["main"]

_EXTRA = ("tyro", "rich", "matplotlib")
_INTERRUPTED = 130

HOMES = {
    "Demo": "demo.demo",
    "Train": "train.train",
    "Compare": "compare.compare",
    "List": "catalogue.list_parts",
    "Explain": "catalogue.explain",
    "Lab": "lab.lab",
    "BenchStep": "bench.step",
    "BenchTrain": "race.train",
    "BenchScale": "scale.scale",
    "Reproduce": "reproduce.reproduce",
}
"""The function that runs each command of `options`."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        words: the command line without the program's name; `sys.argv` if not given.

    Returns:
        The exit code: 0, 1 if it failed, 2 if it was asked for wrongly, 130 after Ctrl-C.
    """
    own = words is None  # this process is there for the command alone, so it may start anew
    words = sys.argv[1:] if words is None else words
    if "torch" not in sys.modules and "--debug" not in words:
        # It warns about hosts without a name, as those of a lab are; read when it is imported.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")  # a terminal that cannot show × gets a ?
    try:
        from .parse import parse

        command = parse(words)
        if own and _needs_lab(command):
            from ..lab.rootless import enter

            enter()
        return _run(command)
    except CommandError as error:
        return _fail(error, error.code, words)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        sentence = (
            f"the command line needs {missing}, which is not installed: "
            "run pip install '.[cli]' in a clone of sparsewire"
        )
        return _fail(CommandError(sentence), FAILED, words)
    except KeyboardInterrupt as error:
        return _fail(CommandError("stopped"), _INTERRUPTED, words, error)
    except BrokenPipeError:
        # The reader of a pipe had enough; a second complaint at exit helps nobody.
        sys.stdout = None
        return FAILED


def _needs_lab(command: Command) -> bool:
    """Whether a command builds a lab, if it can."""
    from . import options

    match command:
        case options.Demo():
            return True
        case options.Train() | options.Compare():
            return command.rate is not None
        case options.Lab():
            return not command.loopback and not command.set
        case options.BenchStep() | options.BenchTrain() | options.BenchScale():
            return not command.loopback
        case _:
            return False


def _run(command: Command) -> int:
    """Run `command`, with the errors of the library as those of the command line."""
    try:
        module, _, function = HOMES[type(command).__name__].partition(".")
        code: int = getattr(import_module(f".{module}", __package__), function)(command)
        return code
    except BrokenPipeError:
        raise
    except OSError as error:
        raise explain_os_error(error, "use") from error
    except RuntimeError as error:
        from ..errors import SchemeError, SparsewireError

        if not isinstance(error, SparsewireError):
            raise
        code = USAGE if isinstance(error, SchemeError) else FAILED
        raise CommandError(str(error), code) from error


def _fail(
    error: CommandError, code: int, words: Sequence[str], cause: BaseException | None = None
) -> int:
    if "--debug" in words:
        traceback.print_exception(cause or error)
    print(f"sparsewire: {error}", file=sys.stderr)
    return code
