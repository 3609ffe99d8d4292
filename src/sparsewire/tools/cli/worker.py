"""One worker process: `python -m sparsewire.tools.cli.worker FOLDER` is what the launcher starts.

It finds its orders in the folder, joins the group that the environment describes, and sends
records through a pipe if it is rank 0. Errors go to the launcher as JSON, never to the terminal.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from .errors import describe

Record = dict[str, Any]
Emit = Callable[[Record], None]
"""Takes the records by which rank 0 tells how the work goes."""

ORDERS = "orders.json"
RECORDS_FD = "SPARSEWIRE_RECORDS_FD"


def train(orders: Any, emit: Emit) -> None:
    """Train several plans in turn."""
    from .plan import Plan
    from .train_rank import take_part

    take_part([Plan(**fields) for fields in orders], emit)


def race(orders: Any, emit: Emit) -> None:
    """Train to a target with one contender after the other."""
    from ..bench.train.plan import Plan
    from .race_rank import run

    run(Plan(**orders), emit)


def measure(orders: Any, emit: Emit) -> None:
    """Take turns with all contenders, and time their steps."""
    from ..bench.step.rank import Plan, take_turns
    from .group import Group

    plan = Plan(**orders)
    group = Group(plan.timeout)
    take_turns(plan, emit)
    group.leave()


WORK = {"train": train, "race": race, "measure": measure}


def main(folder: Path) -> None:
    """Execute the orders, and report an error to the launcher."""
    try:
        orders = tuples(json.loads((folder / ORDERS).read_text()))
        WORK[orders["work"]](orders["orders"], _sender())
    except BaseException as error:
        # Written under another name first: the launcher must never read half a file.
        path = error_file(folder, int(os.environ["RANK"]))
        path.with_suffix(".part").write_text(json.dumps(describe(error)))
        path.with_suffix(".part").replace(path)
        leave_at_once(1)


def tuples(value: Any) -> Any:
    """Return what JSON holds with tuples in place of lists, as plans have them."""
    if isinstance(value, dict):
        return {key: tuples(item) for key, item in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def error_file(folder: Path, rank: int) -> Path:
    """Return the file in which `rank` reports its error."""
    return folder / f"error-{rank}.json"


def leave_at_once(code: int) -> NoReturn:
    """End this process even if its group is broken, where a normal exit would block."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def encode(record: Mapping[str, Any]) -> str:
    """Return a record as one line of JSON."""
    return json.dumps(record, separators=(",", ":"))


def _sender() -> Emit:
    """Return a function that sends records to the launcher."""
    if RECORDS_FD not in os.environ:
        return lambda record: None
    pipe = open(int(os.environ[RECORDS_FD]), "w", encoding="utf-8")  # noqa: SIM115

    def emit(record: Record) -> None:
        pipe.write(encode(record) + "\n")
        pipe.flush()

    return emit


if __name__ == "__main__":
    main(Path(sys.argv[1]))
