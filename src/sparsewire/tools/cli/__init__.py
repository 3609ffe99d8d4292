"""The command line: `sparsewire train`, `compare`, `list`, `explain`, `lab`, `bench`.

Importing this imports no torch; each command imports what it needs when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from .errors import run_guarded

if TYPE_CHECKING:
    from .options import Command

__all__ = ["main"]

HOMES = {
    "Demo": "demo.demo",
    "Train": "train.train",
    "Compare": "compare.compare",
    "List": "catalogue.list_parts",
    "Explain": "catalogue.explain",
    "Lab": "lab.lab",
    "BenchStep": "bench_step.step",
    "BenchTrain": "bench_train.train",
    "BenchScale": "bench_scale.scale",
}
"""The function that runs each command of `options`."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that `words` or `sys.argv` name, and return the exit code.

    It is 0, 1 if the command failed, 2 if it was asked for wrongly, 130 after Ctrl-C.
    """
    own = words is None  # this process is there for the command alone, so it may start anew
    words = sys.argv[1:] if words is None else words

    def work() -> int:
        from .parse import parse

        command = parse(words)
        if own and _needs_lab(command):
            from ..lab.rootless import enter

            enter()
        return _run(command)

    return run_guarded(work, words)


def _needs_lab(command: Command) -> bool:
    """Whether a command builds a lab."""
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
    module, _, function = HOMES[type(command).__name__].partition(".")
    code: int = getattr(import_module(f".{module}", __package__), function)(command)
    return code
