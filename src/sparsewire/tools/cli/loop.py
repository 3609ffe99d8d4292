"""The training loop of one rank.

Everything that a step depends on follows from the plan and the step's number, apart from the
weights, the optimizer and the exchange's memory, which checkpoints keep.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import sparsewire as sw
from sparsewire.report import plural

from ..bench.timing import Timing
from ..tasks import mnist
from . import checkpoint, records
from .errors import CommandError
from .group import Group, StopSign
from .plan import Plan, check_size
from .records import Emit, Record

_STEPS_BETWEEN_RECORDS = 10


class Loop:
    """Trains one plan; `step` is the number of steps done."""

    def __init__(
        self, plan: Plan, data: mnist.Data, group: Group, stop: StopSign, emit: Emit
    ) -> None:
        check_size(len(data.train), plan, group.workers)
        self.step = 0
        self._plan, self._data, self._group, self._stop = plan, data, group, stop
        self._emit: Emit = emit if group.rank == 0 else lambda record: None
        self._net = mnist.build(plan.hidden, plan.seed)
        self._model = DistributedDataParallel(self._net)
        self._optimizer = _optimizer(plan, self._net)
        self._wire = sw.attach(
            self._model,
            sw.parse(plan.scheme),
            optimizer=self._optimizer,  # to refuse momentum twice
            communicate="gradients",
            timeout=plan.timeout,
        )
        self._per_epoch = len(data.train) // (plan.batch_size * group.workers)
        self._total = plan.epochs * self._per_epoch
        self._order = (-1, torch.empty(0))
        self._losses: list[float] = []  # since the last epoch ended
        self._seconds: list[float] = []  # of every step of this run
        self._accuracy, self._tested, self._saved = 0.0, -1, -1
        if plan.resume:
            self._restore()
        self._before = self._wire.report().to_dict()

    def run(self, run: int, runs: int) -> bool:
        """Train to the end, or until asked to stop.

        Args:
            run: the number of this run, from 1, among `runs` that are made in turn.

        Returns:
            Whether it was stopped before the end.
        """
        began = time.perf_counter()
        self._emit(self._opening(run, runs))
        while self.step < self._total and not self._stop.reached(self.step):
            self._train()
            if self.step % _STEPS_BETWEEN_RECORDS == 0:
                self._emit(self._telling("step", loss=self._losses[-1]))
            if self.step % self._per_epoch == 0:
                self._end_epoch()
            if self.step % (self._plan.checkpoint_every or self._per_epoch) == 0:
                self._save()
        self._save()
        if self._tested != self.step:
            self._test()
        self._emit(self._summary(time.perf_counter() - began))
        return self.step < self._total

    def close(self) -> None:
        """End the exchange; the group goes on."""
        self._wire.detach()

    def _train(self) -> None:
        """One step."""
        start = time.perf_counter()
        images, labels = self._data.train.batch(self._chosen())
        loss = cross_entropy(self._model(images), labels)
        self._optimizer.zero_grad()
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            # backward() loses the type of what went wrong in an exchange; the wire keeps it.
            if isinstance(self._wire.error, sw.errors.NonFiniteError):
                raise self._diverged("gradient") from error
            raise self._wire.error or error from error
        self._optimizer.step()
        self._losses.append(loss.item())
        self.step += 1
        self._seconds.append(time.perf_counter() - start)

    def _chosen(self) -> torch.Tensor:
        """The examples of this rank in this step."""
        epoch, position = divmod(self.step, self._per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, mnist.order(self._plan.seed, epoch, len(self._data.train)))
        start = (position * self._group.workers + self._group.rank) * self._plan.batch_size
        return self._order[1][start : start + self._plan.batch_size]

    def _end_epoch(self) -> None:
        """Tell how the epoch went."""
        self._test()
        total, count = self._group.sum(sum(self._losses), len(self._losses))
        self._losses.clear()
        if not math.isfinite(total):
            raise self._diverged("loss")
        self._emit(
            self._telling(
                "epoch",
                epoch=self.step // self._per_epoch,
                loss=total / count,
                test_accuracy=self._accuracy,
            )
        )

    def _diverged(self, what: str) -> CommandError:
        return CommandError(
            f"the {what} was no longer a finite number after {plural(self.step, 'step')} with "
            f"{self._plan.scheme}: try a smaller --lr than {self._plan.lr:g}, or less --momentum"
        )

    def _test(self) -> None:
        """Test the weights, the same on all ranks, each rank with its share of the test set."""
        group = self._group
        counts = mnist.evaluate(self._net, self._data.test, group.rank, group.workers)
        right, asked = group.sum(*counts)
        self._accuracy = right / asked
        self._tested = self.step

    def _save(self) -> None:
        """Write this rank's part of a checkpoint; rank 0 completes it when all have theirs."""
        if self._plan.checkpoint is None or self._saved == self.step:
            return
        directory, rank = Path(self._plan.checkpoint), self._group.rank
        states = {checkpoint.wire_file(rank): self._wire.state_dict()}
        if rank == 0:
            states[checkpoint.MODEL] = {
                "step": self.step,
                "model": self._net.state_dict(),
                "optimizer": self._optimizer.state_dict(),
            }
        written = {
            name: checkpoint.write_file(directory, self.step, name, state)
            for name, state in states.items()
        }
        parts = self._group.collect(f"checkpoint/{self.step}", json.dumps(written))
        if rank == 0:
            files = {name: digest for part in parts for name, digest in json.loads(part).items()}
            checkpoint.complete(directory, self.step, files, self._plan, self._group.workers)
        self._saved = self.step

    def _restore(self) -> None:
        found = checkpoint.to_resume(self._plan, self._group.workers)
        common = found.load(checkpoint.MODEL)
        self._net.load_state_dict(common["model"])
        self._optimizer.load_state_dict(common["optimizer"])
        self._wire.load_state_dict(found.load(checkpoint.wire_file(self._group.rank)))
        self.step = self._saved = int(common["step"])

    def _opening(self, run: int, runs: int) -> Record:
        return {
            "record": "run",
            "schema": records.SCHEMA,
            "task": "mnist",
            "scheme": self._plan.scheme,
            "workers": self._group.workers,
            "run": run,
            "runs": runs,
            "step": self.step,
            "steps": self._total,
            "parameters": sum(parameter.numel() for parameter in self._net.parameters()),
            "config": asdict(self._plan),
            "versions": records.versions(),
        }

    def _telling(self, kind: str, **more: Any) -> Record:
        """A record of where the run stands; bytes are those of this rank."""
        now, recent = self._wire.report().to_dict(), self._seconds[-_STEPS_BETWEEN_RECORDS:]
        sent, dense = (now[key] - self._before[key] for key in ("bytes_sent", "dense_bytes"))
        return {
            "record": kind,
            "step": self.step,
            **more,
            **_costs(sent, dense, len(self._seconds)),
            "step_seconds": statistics.median(recent),
            "train_seconds": sum(self._seconds),
            "memory_norm": now["memory_norm"],
            "gradient_norm": now["gradient_norm"],
        }

    def _summary(self, seconds: float) -> Record:
        """The result of the run; bytes are the mean over all ranks."""
        now, workers, steps = self._wire.report().to_dict(), self._group.workers, len(self._seconds)
        spent = [now[key] - self._before[key] for key in ("bytes_sent", "dense_bytes")]
        sent, dense = self._group.sum(*spent)
        stages = {key: value for key, value in now.items() if key.startswith("seconds_")}
        timing = Timing.of(self._seconds) if steps else None
        return {
            "record": "summary",
            "schema": records.SCHEMA,
            "scheme": self._plan.scheme,
            "workers": workers,
            "step": self.step,
            "steps": self._total,
            "stopped": self.step < self._total,
            "test_accuracy": self._accuracy,
            **_costs(sent / workers, dense / workers, steps),
            "step_seconds": timing.seconds if timing else None,
            "step_quartiles": [timing.low, timing.high] if timing else None,
            "seconds": seconds,
            **stages,
            "model_sha256": _fingerprint(self._net),
        }


def _costs(sent: float, dense: float, steps: int) -> Record:
    return {
        "bytes_per_step": sent / max(steps, 1),
        "dense_bytes_per_step": dense / max(steps, 1),
        "reduction": dense / sent if sent else 1.0,  # one worker alone sends nothing
    }


def _optimizer(plan: Plan, net: nn.Module) -> torch.optim.Optimizer:
    if plan.optimizer == "adagrad":
        return torch.optim.Adagrad(net.parameters(), lr=plan.lr, fused=True)
    return torch.optim.SGD(net.parameters(), lr=plan.lr, momentum=plan.momentum)


def _fingerprint(net: nn.Module) -> str:
    """A hash of all weights: equal for two runs only if they are bit-equal."""
    digest = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
