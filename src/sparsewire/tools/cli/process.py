"""One worker process as its launcher sees it: orders in, records and errors out.

Errors go to the launcher as JSON, never to the terminal.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sparsewire.report import plural

from .errors import CommandError, explain_os_error
from .records import Emit, Record, encode

if TYPE_CHECKING:
    from .group import Group

ORDERS = "orders.json"
RECORDS_FD = "SPARSEWIRE_RECORDS_FD"

Join = Callable[[float], "Group"]
"""Joins the group, whose exchanges may take so many seconds."""


class StepError(Exception):
    """Something went wrong after so many steps of the training; the cause says what."""

    def __init__(self, steps: int) -> None:
        super().__init__(f"failed after {plural(steps, 'step')}")
        self.steps = steps


def serve(work: Callable[[Any, Join, Emit], object]) -> None:
    """Do `work` with the orders that lie in the folder of the command line, and tell how it ended.

    Args:
        work: takes the orders, how to join the group, and what takes the records of rank 0.
    """
    folder = Path(sys.argv[1])
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def join(timeout: float) -> Group:
        from .group import Group

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return Group.launched(rank, workers, address, port, timeout)

    try:
        work(json.loads((folder / ORDERS).read_text()), join, _sender())
    except BaseException as error:
        # Written under another name first: the launcher must never read half a file.
        written = error_file(folder, rank).with_suffix(".part")
        written.write_text(json.dumps(describe(error)))
        written.replace(error_file(folder, rank))
        leave_at_once(1)


def error_file(folder: Path, rank: int) -> Path:
    """Where `rank` says why it gave up."""
    return folder / f"error-{rank}.json"


def describe(error: BaseException) -> Record:
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


def leave_at_once(code: int) -> NoReturn:
    """End this process even if its group is broken, where a normal exit would block."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _sender() -> Emit:
    """Send records to the launcher, which has the terminal and the files."""
    if RECORDS_FD not in os.environ:
        return lambda record: None
    pipe = open(int(os.environ[RECORDS_FD]), "w", encoding="utf-8")  # noqa: SIM115

    def emit(record: Record) -> None:
        pipe.write(encode(record) + "\n")
        pipe.flush()

    return emit
