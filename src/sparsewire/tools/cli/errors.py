"""How a command fails: one sentence on standard error, and an exit code."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

FAILED = 1
USAGE = 2
INTERRUPTED = 130
_EXTRA = ("jinja2", "matplotlib", "rich", "scipy")


class CommandError(Exception):
    """A failure that is reported in one sentence, without a traceback."""

    def __init__(self, sentence: str, code: int = FAILED) -> None:
        super().__init__(sentence)
        self.code = code


@contextlib.contextmanager
def explaining(doing: str, path: Path | None = None) -> Iterator[None]:
    """Turn an `OSError` in the block into a `CommandError` that says what could not be done.

    Args:
        doing: as in "write results to".
        path: the file or folder to name; by default the one that the error names.
    """
    try:
        yield
    except OSError as error:
        raise _os_error(error, doing, path) from None


def _os_error(error: OSError, doing: str, path: Path | None = None) -> CommandError:
    where = path or error.filename
    return CommandError(f"cannot {doing}{f' {where}' if where else ''}: {error.strerror or error}")


class StepError(Exception):
    """A failure after a number of training steps; the cause says what went wrong."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.steps = steps


def describe(error: BaseException) -> dict[str, Any]:
    """Return an error as plain data: a sentence, its time and step, and its likely cause."""
    from sparsewire.errors import ExchangeError, SparsewireError

    steps = error.steps if isinstance(error, StepError) else None
    cause = error.__cause__ if isinstance(error, StepError) and error.__cause__ else error
    known = _in_words(cause)
    # torch appends its C++ stack after the first line.
    first = (str(cause).splitlines() or [""])[0]
    sentence = known or f"{type(cause).__name__}: {first} (--debug shows the traceback)"
    # When one rank is gone, the others' connections break; those errors are not the cause.
    broken = type(cause) is ExchangeError or (
        isinstance(cause, RuntimeError) and not isinstance(cause, SparsewireError)
    )
    return {
        "steps": steps,
        "sentence": str(sentence),
        "expected": isinstance(cause, CommandError),
        "aftermath": broken,
        "when": time.time(),
        "traceback": "".join(traceback.format_exception(cause)),
    }


def run_guarded(work: Callable[[], int], words: Sequence[str]) -> int:
    """Run a program's command, and report a failure in one sentence.

    Args:
        work: returns the exit code.
        words: the command line; `--debug` in it shows tracebacks.

    Returns:
        The exit code: what `work` returns, 1 or an error's own code if it failed, 130 after Ctrl-C.
    """
    if "torch" not in sys.modules and "--debug" not in words:
        # Torch warns about hosts without a name, such as those of a lab. It reads this on import.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")  # a terminal that cannot show × gets a ?
    try:
        return work()
    except BrokenPipeError:
        # The reader of the pipe is gone; this avoids a second error at exit.
        sys.stdout = None
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        failure = _in_words(error)
        if failure is None:
            raise
        if "--debug" in words:
            traceback.print_exception(error)
        print(f"sparsewire: {failure}", file=sys.stderr)
        return failure.code


def _in_words(error: BaseException) -> CommandError | None:
    """Return an error as the command line reports it, or None if it is a defect of the program."""
    if isinstance(error, CommandError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return CommandError("stopped", INTERRUPTED)
    if isinstance(error, OSError):
        return _os_error(error, "use")
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or "").partition(".")[0]
        sentence = (
            f"the command line needs {missing}, which is not installed: "
            "run pip install '.[cli]' in a clone of sparsewire"
        )
        return CommandError(sentence) if missing in _EXTRA else None
    if isinstance(error, RuntimeError):
        from sparsewire.errors import SparsewireError

        code = USAGE if isinstance(error, ValueError) else FAILED  # an unknown scheme or model
        return CommandError(str(error), code) if isinstance(error, SparsewireError) else None
    return None
