"""How a command fails: one sentence on standard error, and an exit code."""

from __future__ import annotations

import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
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


def explain_os_error(error: OSError, doing: str) -> CommandError:
    """Return an error for a file that could not be opened, written or listed."""
    where = f" {error.filename}" if error.filename else ""
    return CommandError(f"cannot {doing}{where}: {error.strerror or error}")


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
    if isinstance(cause, (CommandError, SparsewireError)):
        sentence = str(cause)
    elif isinstance(cause, OSError):
        sentence = str(explain_os_error(cause, "use"))
    else:
        # torch appends its C++ stack after the first line.
        first = (str(cause).splitlines() or [""])[0]
        sentence = f"{type(cause).__name__}: {first} (--debug shows the traceback)"
    # When one rank is gone, the others' connections break; those errors are not the cause.
    broken = type(cause) is ExchangeError or (
        isinstance(cause, RuntimeError) and not isinstance(cause, SparsewireError)
    )
    return {
        "steps": steps,
        "sentence": sentence,
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
        return _explained(work)
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
        return _fail(CommandError("stopped"), INTERRUPTED, words, error)
    except BrokenPipeError:
        # The reader of the pipe is gone; this avoids a second error at exit.
        sys.stdout = None
        return FAILED


def _explained(work: Callable[[], int]) -> int:
    """Do `work`, and turn errors of the library into those of the command line."""
    try:
        return work()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise explain_os_error(error, "use") from error
    except RuntimeError as error:
        from sparsewire.errors import SchemeError, SparsewireError

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
