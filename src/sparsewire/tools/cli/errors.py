"""How a command fails: one sentence for the person at the terminal, and an exit code."""

from __future__ import annotations

import time
import traceback
from typing import Any

FAILED = 1
USAGE = 2


class CommandError(Exception):
    """A failure that is explained in one sentence, without a traceback."""

    def __init__(self, sentence: str, code: int = FAILED) -> None:
        super().__init__(sentence)
        self.code = code


def explain_os_error(error: OSError, doing: str) -> CommandError:
    """One sentence for a file that could not be opened, written or listed."""
    where = f" {error.filename}" if error.filename else ""
    return CommandError(f"cannot {doing}{where}: {error.strerror or error}")


class StepError(Exception):
    """Something went wrong after so many steps of the training; the cause says what."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.steps = steps


def describe(error: BaseException) -> dict[str, Any]:
    """An error as plain data: a sentence, where and when it happened, if a peer is behind it."""
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
    # When one rank is gone, the others' connections break: that explains nothing by itself.
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
