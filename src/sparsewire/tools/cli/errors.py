"""How a command fails: one sentence for the person at the terminal, and an exit code."""

from __future__ import annotations

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
