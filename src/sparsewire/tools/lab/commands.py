"""Run `ip` and `tc` without a shell, and report why they failed in their own words."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence

from sparsewire.errors import SparsewireError

_PATIENCE = 30.0  # seconds; each takes a few milliseconds
_ADMINISTRATION = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # not in every user's PATH


class LabError(SparsewireError):
    """A lab that cannot be built, changed or measured; it says which command failed, and why."""


def find(name: str) -> str | None:
    """The path of a command, wherever administrators keep theirs; None if it is not installed."""
    places = (os.environ.get("PATH", os.defpath), *_ADMINISTRATION)
    return shutil.which(name, path=os.pathsep.join(places))


def run(command: Sequence[str]) -> str:
    """Run one command and return what it prints."""
    name, *words = command
    path = find(name)
    if path is None:
        raise LabError(f"there is no command {name}: install iproute2")
    try:
        ended = subprocess.run(
            [path, *words],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            start_new_session=True,  # the terminal's Ctrl-C is for this process alone
        )
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
