"""One rank of `train` and `compare`: runs its plans, and writes records and checkpoints.

Rank 0 emits a "run" record, then "step" and "epoch" records, and finally a "summary". The metrics
file, the progress display and `--json` all use these records.
"""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from ..bench.setting import version
from ..bench.step.rank import gather_texts
from ..bench.timing import Timing
from ..tasks import training
from . import checkpoint
from .errors import StepError
from .group import Group, StopSign
from .loop import Loop, test
from .plan import Plan
from .worker import Emit, Record

SCHEMA = 1  # version of the record format
_STEPS_BETWEEN_RECORDS = 10


def take_part(plans: Sequence[Plan], emit: Emit) -> bool:
    """Train all `plans`, which may differ only in their schemes, in turn as one rank of a group.

    Records are emitted on rank 0 only. Returns whether training was stopped before the end.
    """
    group = Group(plans[0].timeout)
    stop = StopSign(group)
    task = training.make(plans[0], group.rank, group.workers)
    for number, plan in enumerate(plans, start=1):
        loop = Loop(task, plan.scheme, group, plan.timeout)
        run = _Run(plan, loop, task, group, stop, number, emit)
        try:
            run.to_the_end(runs=len(plans))
        except Exception as error:
            raise StepError(loop.step) from error
        loop.entry.leave()
        if run.is_stopped:
            break
    group.leave()
    return run.is_stopped


class _Run:
    """Callbacks for the training of one plan: records, checkpoints, and stopping on request."""

    def __init__(
        self,
        plan: Plan,
        loop: Loop,
        task: training.Task,
        group: Group,
        stop: StopSign,
        number: int,
        emit: Emit,
    ) -> None:
        assert loop.entry.wire is not None  # every plan has a scheme
        self._plan, self._loop, self._task, self._group = plan, loop, task, group
        self._wire, self._stop, self._number = loop.entry.wire, stop, number
        self._emit: Emit = emit if group.rank == 0 else lambda record: None
        self._total = plan.epochs * task.steps
        self._saved = -1
        if plan.resume:
            self._restore()
        self._before = self._wire.report().to_dict()

    @property
    def is_stopped(self) -> bool:
        """Whether the run ended before its last step."""
        return self._loop.step < self._total

    def to_the_end(self, runs: int) -> None:
        """Train until the last step or a stop request. `runs` is the total number of runs."""
        loop, began = self._loop, perf_counter()
        self._emit(self._opening(runs))
        loop.run(self._total, self._task.steps, self)
        self._save()
        if loop.tested != loop.step:  # nothing was left to train
            loop.score = test(loop.net, self._task, self._group)
        self._emit(self._summary(perf_counter() - began))

    def is_over(self, loop: Loop) -> bool:
        """Return whether all ranks must stop before the next step."""
        return self._stop.reached(self._number, loop.step)

    def stepped(self, loop: Loop) -> None:
        """Record every tenth step, and save a checkpoint when one is due."""
        if loop.step % _STEPS_BETWEEN_RECORDS == 0:
            self._emit(self._telling("step", loss=loop.last_loss))
        if loop.step % (self._plan.checkpoint_every or self._task.steps) == 0:
            self._save()

    def tested(self, loop: Loop) -> None:
        """Record the end of an epoch."""
        epoch, rest = divmod(loop.step, self._task.steps)
        if rest == 0:
            self._emit(
                self._telling("epoch", epoch=epoch, loss=loop.loss, test_accuracy=loop.score)
            )

    def _save(self) -> None:
        """Write this rank's part of a checkpoint; rank 0 completes it once all parts exist."""
        step, rank = self._loop.step, self._group.rank
        if self._plan.checkpoint is None or self._saved == step:
            return
        directory = Path(self._plan.checkpoint)
        states = {checkpoint.wire_file(rank): self._wire.state_dict()}
        if rank == 0:
            states[checkpoint.MODEL] = {
                "step": step,
                "model": self._loop.net.state_dict(),
                "optimizer": self._loop.optimizer.state_dict(),
            }
        written = {
            name: checkpoint.write_file(directory, step, name, state)
            for name, state in states.items()
        }
        parts = gather_texts(json.dumps(written))
        if rank == 0:
            files = {name: digest for part in parts for name, digest in json.loads(part).items()}
            checkpoint.complete(directory, step, files, self._plan, self._group.workers)
        self._saved = step

    def _restore(self) -> None:
        found = checkpoint.to_resume(self._plan, self._group.workers)
        common = found.load(checkpoint.MODEL)
        self._loop.net.load_state_dict(common["model"])
        self._loop.optimizer.load_state_dict(common["optimizer"])
        self._wire.load_state_dict(found.load(checkpoint.wire_file(self._group.rank)))
        self._loop.step = self._saved = int(common["step"])

    def _opening(self, runs: int) -> Record:
        return {
            "record": "run",
            "schema": SCHEMA,
            "task": "mnist",
            "scheme": self._plan.scheme,
            "workers": self._group.workers,
            "run": self._number,
            "runs": runs,
            "step": self._loop.step,
            "steps": self._total,
            "parameters": sum(parameter.numel() for parameter in self._loop.net.parameters()),
            "config": asdict(self._plan),
            "versions": versions(),
        }

    def _telling(self, kind: str, **more: Any) -> Record:
        """Return a record of the run so far. Byte counts are for this rank."""
        now, seconds = self._wire.report().to_dict(), self._loop.seconds
        sent, dense = (now[key] - self._before[key] for key in ("bytes_sent", "dense_bytes"))
        return {
            "record": kind,
            "step": self._loop.step,
            **more,
            **_costs(sent, dense, len(seconds)),
            "step_seconds": statistics.median(seconds[-_STEPS_BETWEEN_RECORDS:]),
            "train_seconds": sum(seconds),
            "memory_norm": now["memory_norm"],
            "gradient_norm": now["gradient_norm"],
        }

    def _summary(self, seconds: float) -> Record:
        """Return the summary of the run. Byte counts are means over all ranks."""
        loop, workers = self._loop, self._group.workers
        now = self._wire.report().to_dict()
        spent = [now[key] - self._before[key] for key in ("bytes_sent", "dense_bytes")]
        sent, dense = self._group.sum(*spent)
        stages = {key: value for key, value in now.items() if key.startswith("seconds_")}
        timing = Timing.of(loop.seconds) if loop.seconds else None
        return {
            "record": "summary",
            "schema": SCHEMA,
            "scheme": self._plan.scheme,
            "workers": workers,
            "step": loop.step,
            "steps": self._total,
            "stopped": self.is_stopped,
            "test_accuracy": loop.score,
            **_costs(sent / workers, dense / workers, len(loop.seconds)),
            "step_seconds": timing.seconds if timing else None,
            "step_quartiles": [timing.low, timing.high] if timing else None,
            "seconds": seconds,
            **stages,
            "model_sha256": _fingerprint(loop.net),
        }


def versions() -> dict[str, str]:
    """Return the software versions that affect results."""
    return {
        "sparsewire": version("sparsewire"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _costs(sent: float, dense: float, steps: int) -> Record:
    return {
        "bytes_per_step": sent / max(steps, 1),
        "dense_bytes_per_step": dense / max(steps, 1),
        "reduction": dense / sent if sent else 1.0,  # a single worker sends nothing
    }


def _fingerprint(net: nn.Module) -> str:
    """Return a hash of all weights, equal for two runs only if the weights are bit-equal."""
    digest = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
