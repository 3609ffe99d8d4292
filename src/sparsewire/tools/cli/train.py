"""`sparsewire train`: one scheme, in processes started here or by torchrun."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import sparsewire as sw
from sparsewire.notation import short
from sparsewire.report import plural

from ..tasks import mnist
from ..tasks.idx import DataError
from ..tasks.training import steps_in_epoch
from . import checkpoint, site
from .errors import USAGE, CommandError, describe
from .launcher import launch
from .options import Train, Training
from .plan import Plan, check, make
from .publish import make_folder
from .recorder import Recorder, cost
from .train_rank import take_part
from .worker import Emit, Record, encode, leave_at_once

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def train(options: Train) -> int:
    """Train one scheme and return the exit code."""
    check(options)
    (plan,) = plans(options, [options.scheme], group_size(options))
    prepare(plan, group_size(options))
    if under_torchrun():
        if options.rate is not None:
            raise CommandError(
                "--rate builds a lab, which starts the workers itself: run without torchrun", USAGE
            )
        return _as_rank(options, plan)
    record = Recorder(options.metrics, plan.resume, options.quiet)
    with record:
        stopped_by = run([plan], options, record)
    return _conclude(options, plan, record.results[-1].summary, stopped_by)


def run(plans: Sequence[Plan], options: Training, emit: Emit) -> signal.Signals | None:
    """Train `plans` in turn in new processes, and return the signal that stopped them, if any."""
    orders, rate = [asdict(plan) for plan in plans], None
    if options.rate is not None:
        site.check_lab("leave --rate out")
        rate = site.read_rate(options.rate)
    with site.choose(options.workers, rate, options.rate is None) as place:
        return launch(
            "train", orders, place, emit, stops_gently=True, port=options.port, debug=options.debug
        )


def under_torchrun() -> bool:
    """Whether torchrun started this process as a rank."""
    return all(name in os.environ for name in _TORCHRUN)


def group_size(options: Training) -> int:
    """Return the number of workers."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else options.workers


def plans(options: Training, schemes: Sequence[str], workers: int) -> list[Plan]:
    """Return a checked plan for each scheme text, before anything starts."""
    canonical = [repr(sw.parse(text)) for text in schemes]
    folder = mnist.find(options.data)
    examples = len(mnist.load(folder, options.limit).train)
    try:
        steps_in_epoch(examples, options.batch_size, workers, "image")
    except DataError as error:
        raise CommandError(str(error), USAGE) from None
    return [make(options, scheme, folder) for scheme in canonical]


def prepare(plan: Plan, workers: int) -> None:
    """Check that checkpoints can be read and written, before any worker starts."""
    if plan.checkpoint is None:
        return
    directory = Path(plan.checkpoint)
    if plan.resume:
        checkpoint.to_resume(plan, workers).verify()
    else:
        checkpoint.refuse_to_overwrite(directory)
    make_folder(directory, "write checkpoints in")


def _as_rank(options: Train, plan: Plan) -> int:
    """Take part as the rank that torchrun made this process."""
    first = os.environ["RANK"] == "0"
    record = Recorder(options.metrics if first else None, plan.resume, options.quiet or not first)
    try:
        with record:
            stopped = take_part([plan], record)
    except Exception as error:
        report = describe(error)
        steps = report["steps"]
        where = f" failed after {plural(steps, 'step')}" if steps is not None else ""
        said = report["traceback"] if options.debug else ""
        print(
            f"{said}sparsewire: worker {os.environ['RANK']}{where}: {report['sentence']}",
            file=sys.stderr,
        )
        leave_at_once(1)
    stopped_by = signal.SIGINT if stopped else None
    if first:
        return _conclude(options, plan, record.results[-1].summary, stopped_by)
    return 128 + stopped_by if stopped_by else 0


def _conclude(
    options: Train, plan: Plan, summary: Record, stopped_by: signal.Signals | None
) -> int:
    """Print the result and return the exit code."""
    if options.json:
        print(encode(summary))
    elif not options.quiet:
        print(
            f"{short(plan.scheme)}: test accuracy {summary['test_accuracy']:.2%} after "
            f"{plural(summary['step'], 'step')}, {cost(summary)}"
        )
    if not summary["stopped"]:
        return 0
    code = 128 + (stopped_by or signal.SIGINT)
    where = f"stopped after step {summary['step']} of {summary['steps']}"
    if plan.checkpoint:
        raise CommandError(
            f"{where}; the state is saved in {options.checkpoint}: "
            "the same command with --resume goes on from there",
            code,
        )
    raise CommandError(f"{where}; nothing was saved: --checkpoint DIR makes a run resumable", code)
