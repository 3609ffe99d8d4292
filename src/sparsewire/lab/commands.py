"""Runs `ip` and `tc`, without a shell, and says in their own words why they failed."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterable, Sequence

from .errors import LabError

_PATIENCE = 30.0  # seconds; each takes a few milliseconds


def run(command: Sequence[str]) -> str:
    """Run one command and return what it prints."""
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            start_new_session=True,  # the terminal's Ctrl-C is for this process alone
        )
    except FileNotFoundError:
        raise LabError(f"there is no command {command[0]}: install iproute2") from None
    except subprocess.TimeoutExpired:
        raise LabError(f"`{shlex.join(command)}` did not end in {_PATIENCE:g} s") from None
    if ended.returncode:
        said = " ".join(ended.stderr.split()) or f"exit code {ended.returncode}"
        raise LabError(f"`{shlex.join(command)}` failed: {said}")
    return ended.stdout


def run_all(commands: Iterable[Sequence[str]]) -> None:
    """Run commands in turn, up to the first that fails."""
    for command in commands:
        run(command)
