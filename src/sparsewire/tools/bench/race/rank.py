"""One rank of a race: trains with every contender in turn, and rank 0 tells about it.

Its records: "opening" about the model, "contender" when one begins, "step" after each of its
steps as a sign of life, "testing" when the clock stops for a look at the test set, "point" with
what was found there, "finished" at a contender's end, "failed" for one that cannot go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from sparsewire.errors import NonFiniteError
from sparsewire.report import plural

from .. import interface
from ..contenders import Entry
from ..rank import find_unable
from .plan import MOMENTUM, WARM_UP, Plan
from .tasks import GOALS, Task, make

Emit = Callable[[dict[str, Any]], None]


def run(plan: Plan, emit: Emit) -> None:
    """Train as `plan` says, as a rank of the default process group."""
    tell: Emit = emit if dist.get_rank() == 0 else lambda record: None
    task = make(plan, dist.get_rank(), dist.get_world_size())
    net = task.build()
    start = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    parameters = list(net.parameters())
    tell(
        {
            "record": "opening",
            "parameters": sum(p.numel() for p in parameters),
            "tensors": len(parameters),
            "examples": plan.batch_size,
            "score": _test(net, task),  # everybody's first point
        }
    )
    cannot = find_unable(set(plan.contenders))
    for name in plan.contenders:
        if name in cannot:
            tell({"record": "failed", "contender": name, "reason": cannot[name]})
            continue
        tell({"record": "contender", "contender": name})
        net.load_state_dict(start)
        reason = _Training(plan, name, net, task, tell).run()
        if reason is not None:
            tell({"record": "failed", "contender": name, "reason": reason})
        else:
            tell({"record": "finished", "contender": name})


class _Training:
    """One contender's way to the target, on one rank."""

    def __init__(self, plan: Plan, name: str, net: nn.Module, task: Task, tell: Emit) -> None:
        self._plan, self._name, self._net, self._task, self._tell = plan, name, net, task, tell
        self._goal, self._world = GOALS[plan.model], dist.get_world_size()
        self._step = 0
        self._seconds = 0.0  # of training, on the slowest rank
        self._wire: float | None = 0.0
        self._optimizer = _optimizer(plan, net)
        self._schedule = LambdaLR(self._optimizer, _rises if plan.optimizer == "adamw" else _stays)
        self._entry = Entry(name, net, self._optimizer, perf_counter, plan.timeout)

    def run(self) -> str | None:
        """Train until the target or the limit; returns why it could go on no further, if so."""
        try:
            is_there = False
            while not is_there and self._step < self._plan.limit_steps:
                if not math.isfinite(self._leg()):
                    return self._diverged("loss")
                self._tell({"record": "testing", "step": self._step})
                score = _test(self._net, self._task)
                is_there = self._goal.reached(score, self._plan.target)
                self._tell({"record": "point", **self._point(score)})
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
        self._optimizer.zero_grad()
        loss = self._task.loss(self._entry.model, self._step)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._schedule.step()
        self._step += 1
        return loss.item()

    def _point(self, score: float) -> dict[str, Any]:
        """Where the training stands; bytes as the mean over all ranks."""
        payload, wire = _sum(self._entry.sent(self._world), self._wire or 0.0)
        return {
            "contender": self._name,
            "step": self._step,
            "seconds": self._seconds,
            "score": score,
            "payload": payload / self._world,
            "wire": None if self._wire is None else wire / self._world,
        }

    def _diverged(self, what: str) -> str:
        return (
            f"the {what} was no longer a finite number within {plural(self._step, 'step')}: "
            f"try a smaller --lr than {self._plan.lr:g}"
        )


def _test(net: nn.Module, task: Task) -> float:
    """The mean score over all ranks' shares of the test set; the same on all ranks."""
    total, count = _sum(*task.test(net))
    return total / count


def _sum(*values: float) -> list[float]:
    """Each value's sum over all ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return [float(value) for value in total]


def _rises(step: int) -> float:
    """The share of the learning rate at a step."""
    return min(1.0, (step + 1) / WARM_UP)


def _stays(step: int) -> float:
    return 1.0


def _optimizer(plan: Plan, net: nn.Module) -> torch.optim.Optimizer:
    if plan.optimizer == "adagrad":
        return torch.optim.Adagrad(net.parameters(), lr=plan.lr, fused=True)
    if plan.optimizer == "adamw":
        return torch.optim.AdamW(net.parameters(), lr=plan.lr, fused=True)
    return torch.optim.SGD(net.parameters(), lr=plan.lr, momentum=MOMENTUM)
