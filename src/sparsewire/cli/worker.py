"""One rank: joins the group, trains what is planned, and leaves without a mess.

`python -m sparsewire.cli.worker FOLDER` is what the launcher starts; a process that torchrun
started calls `take_part` itself. Errors go to the launcher as JSON, never to the terminal.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from .errors import CommandError, explain_os_error
from .plan import Plan, cores
from .records import Emit, Record, encode

if TYPE_CHECKING:
    from .group import Group, StopSign

PLANS = "plans.json"
RECORDS_FD = "SPARSEWIRE_RECORDS_FD"
PARENT = "SPARSEWIRE_PARENT"
_PR_SET_PDEATHSIG = 1


class StepError(Exception):
    """Something went wrong after so many steps of the training; the cause says what."""

    def __init__(self, steps: int) -> None:
        super().__init__(f"failed after {steps} steps")
        self.steps = steps


def error_file(folder: Path, rank: int) -> Path:
    """Where `rank` says why it gave up."""
    return folder / f"error-{rank}.json"


def take_part(
    plans: Sequence[Plan],
    join: Callable[[], Group],
    emit: Emit,
    stop_on: Sequence[signal.Signals] = (),
) -> bool:
    """Train all `plans` in turn, which share their data, as one rank of a group.

    Args:
        join: joins the group.
        emit: takes the records that rank 0 makes.
        stop_on: signals that stop the whole group after the step at hand.

    Returns:
        Whether it was stopped before the end.
    """
    import torch

    from ..tasks import mnist
    from .group import StopSign
    from .loop import Loop

    data = mnist.load(Path(plans[0].data), plans[0].limit)
    group = join()
    torch.set_num_threads(max(1, cores() // group.workers))
    stopped = False
    for number, plan in enumerate(plans, start=1):
        stop = StopSign(group, number)
        _ask_on(stop_on, stop)
        loop = Loop(plan, data, group, stop, emit)
        try:
            stopped = loop.run(number, len(plans))
        except Exception as error:
            raise StepError(loop.step) from error
        loop.close()
        if stopped:
            break
    group.leave()
    return stopped


def _ask_on(signals: Sequence[signal.Signals], stop: StopSign) -> None:
    def ask(number: int, frame: FrameType | None) -> None:
        stop.asked = True

    for number in signals:
        signal.signal(number, ask)


def describe(error: BaseException) -> Record:
    """An error as plain data: a sentence, where it happened, and whether a peer is behind it."""
    from ..errors import ExchangeError, SparsewireError

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
        "traceback": "".join(traceback.format_exception(cause)),
    }


def leave_at_once(code: int) -> NoReturn:
    """End this process even if its group is broken, where a normal exit would block."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_with_parent() -> None:
    """Have the kernel end this process when the launcher is gone, even by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):
        os._exit(1)  # it was gone before the kernel was asked


def _sender() -> Emit:
    """Send records to the launcher, which has the terminal and the files."""
    if RECORDS_FD not in os.environ:
        return lambda record: None
    pipe = open(int(os.environ[RECORDS_FD]), "w", encoding="utf-8")  # noqa: SIM115

    def emit(record: Record) -> None:
        pipe.write(encode(record) + "\n")
        pipe.flush()

    return emit


def main() -> None:
    """Be the rank that the environment names, with the plans in the folder of the command line."""
    _die_with_parent()
    folder = Path(sys.argv[1])
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        plans = [Plan.from_dict(fields) for fields in json.loads((folder / PLANS).read_text())]

        def join() -> Group:
            from .group import Group

            return Group.launched(rank, workers, int(os.environ["MASTER_PORT"]), plans[0].timeout)

        take_part(plans, join, _sender())
    except BaseException as error:
        # Written under another name first: the launcher must never read half a file.
        written = error_file(folder, rank).with_suffix(".part")
        written.write_text(json.dumps(describe(error)))
        written.replace(error_file(folder, rank))
        leave_at_once(1)


if __name__ == "__main__":
    main()
