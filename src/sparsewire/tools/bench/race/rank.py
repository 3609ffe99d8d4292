"""One rank of a race: trains with every contender in turn, and rank 0 tells about it.

Its records: "opening" about the model, "contender" when one begins, "step" after each of its
steps as a sign of life, "testing" when the clock stops for a look at the test set, "point" with
what was found there, "finished" at a contender's end, "failed" for one that cannot go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from sparsewire.errors import NonFiniteError
from sparsewire.report import plural

from ...tasks import mnist
from ...tasks.idx import DataError
from .. import interface
from ..contenders import Entry
from ..rank import find_unable
from .plan import MOMENTUM, Plan

Emit = Callable[[dict[str, Any]], None]


def run(plan: Plan, emit: Emit) -> None:
    """Train as `plan` says, as a rank of the default process group."""
    tell: Emit = emit if dist.get_rank() == 0 else lambda record: None
    data = mnist.load(Path(plan.data))
    needed = dist.get_world_size() * plan.batch_size
    if needed > len(data.train):
        raise DataError(
            f"a step of all hosts needs {needed:,} images, but there are {len(data.train):,}: "
            f"take a smaller --batch-size"
        )
    net = mnist.build(plan.hidden, plan.seed)
    start = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    parameters = list(net.parameters())
    tell(
        {
            "record": "opening",
            "parameters": sum(p.numel() for p in parameters),
            "tensors": len(parameters),
            "examples": plan.batch_size,
            "accuracy": _test(net, data),  # everybody's first point
        }
    )
    cannot = find_unable(set(plan.contenders))
    for name in plan.contenders:
        if name in cannot:
            tell({"record": "failed", "contender": name, "reason": cannot[name]})
            continue
        tell({"record": "contender", "contender": name})
        net.load_state_dict(start)
        reason = _Training(plan, name, net, data, tell).run()
        if reason is not None:
            tell({"record": "failed", "contender": name, "reason": reason})
        else:
            tell({"record": "finished", "contender": name})


class _Training:
    """One contender's way to the target, on one rank."""

    def __init__(self, plan: Plan, name: str, net: nn.Module, data: mnist.Data, tell: Emit) -> None:
        self._plan, self._name, self._net, self._data, self._tell = plan, name, net, data, tell
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._per_epoch = len(data.train) // (plan.batch_size * self._world)
        self._order = (-1, torch.empty(0))
        self._step = 0
        self._seconds = 0.0  # of training, on the slowest rank
        self._wire: float | None = 0.0
        self._optimizer = _optimizer(plan, net)
        self._entry = Entry(name, net, self._optimizer, perf_counter, plan.timeout)

    def run(self) -> str | None:
        """Train until the target or the limit; returns why it could go on no further, if so."""
        try:
            accuracy = 0.0
            while accuracy < self._plan.target and self._step < self._plan.limit_steps:
                if not math.isfinite(self._leg()):
                    return self._diverged("loss")
                self._tell({"record": "testing", "step": self._step})
                accuracy = _test(self._net, self._data)
                self._tell({"record": "point", **self._point(accuracy)})
        except RuntimeError:
            wire = self._entry.wire
            if wire is None or not isinstance(wire.error, NonFiniteError):
                raise
            return self._diverged("gradient")  # on all ranks alike
        finally:
            self._entry.leave()
        return None

    def _leg(self) -> float:
        """The steps up to the next look at the test set, on the clock; the sum of all losses."""
        until = min(self._step + self._plan.evaluate_every, self._plan.limit_steps)
        total = 0.0
        dist.barrier()
        before = interface.sent()
        began = perf_counter()
        while self._step < until:
            total += self._train()
            told = self._seconds + perf_counter() - began
            self._tell({"record": "step", "step": self._step, "seconds": told})
        took = torch.tensor(perf_counter() - began, dtype=torch.float64)
        after = interface.sent()
        if before is None or after is None or self._wire is None:
            self._wire = None
        else:
            self._wire += after - before
        dist.all_reduce(took, dist.ReduceOp.MAX)
        self._seconds += float(took)
        return _sum(total)[0]

    def _train(self) -> float:
        """One step."""
        images, labels = self._data.train.batch(self._chosen())
        self._optimizer.zero_grad()
        loss = cross_entropy(self._entry.model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._step += 1
        return loss.item()

    def _chosen(self) -> torch.Tensor:
        """The images of this rank in this step, whoever trains."""
        epoch, position = divmod(self._step, self._per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, mnist.order(self._plan.seed, epoch, len(self._data.train)))
        start = (position * self._world + self._rank) * self._plan.batch_size
        return self._order[1][start : start + self._plan.batch_size]

    def _point(self, accuracy: float) -> dict[str, Any]:
        """Where the training stands; bytes as the mean over all ranks."""
        payload, wire = _sum(self._entry.sent(self._world), self._wire or 0.0)
        return {
            "contender": self._name,
            "step": self._step,
            "seconds": self._seconds,
            "accuracy": accuracy,
            "payload": payload / self._world,
            "wire": None if self._wire is None else wire / self._world,
        }

    def _diverged(self, what: str) -> str:
        return (
            f"the {what} was no longer a finite number within {plural(self._step, 'step')}: "
            f"try a smaller --lr than {self._plan.lr:g}"
        )


def _test(net: nn.Module, data: mnist.Data) -> float:
    """The share of the test set that is right, each rank with its share; the same on all ranks."""
    right, asked = _sum(*mnist.evaluate(net, data.test, dist.get_rank(), dist.get_world_size()))
    return right / asked


def _sum(*values: float) -> list[float]:
    """Each value's sum over all ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return [float(value) for value in total]


def _optimizer(plan: Plan, net: nn.Module) -> torch.optim.Optimizer:
    if plan.optimizer == "adagrad":
        return torch.optim.Adagrad(net.parameters(), lr=plan.lr, fused=True)
    return torch.optim.SGD(net.parameters(), lr=plan.lr, momentum=MOMENTUM)
