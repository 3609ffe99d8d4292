"""One rank of a race: trains with every contender in turn, and rank 0 tells about it.

Its records: "opening" about the model, "contender" when one begins, "step" after each of its
steps as a sign of life, "point" after each look at the test set, "finished" at a contender's end,
"failed" for one that cannot go on.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..bench.step.rank import find_unable
from ..bench.train.plan import GOALS, Plan
from ..tasks import training
from .group import Group
from .loop import Diverged, Loop, test
from .worker import Emit


def run(plan: Plan, emit: Emit) -> None:
    """Train as `plan` says, as one rank of a group."""
    group = Group(plan.timeout)
    tell: Emit = emit if group.rank == 0 else lambda record: None
    task = training.make(plan, group.rank, group.workers)
    net = task.build()
    sizes = [parameter.numel() for parameter in net.parameters()]
    tell(
        {
            "record": "opening",
            "parameters": sum(sizes),
            "tensors": len(sizes),
            "examples": plan.batch_size,
            "score": test(net, task, group),  # the first point of every contender
        }
    )
    del net
    unable = find_unable(set(plan.contenders))
    for name in plan.contenders:
        reason = unable.get(name)
        if reason is None:
            tell({"record": "contender", "contender": name})
            loop = Loop(task, name, group, plan.timeout)
            try:
                loop.run(plan.limit_steps, plan.evaluate_every, _Watch(plan, name, group, tell))
            except Diverged as error:
                reason = str(error)
            finally:
                loop.entry.leave()
        kind = "finished" if reason is None else "failed"
        tell({"record": kind, "contender": name, "reason": reason})
    group.leave()


@dataclass(frozen=True)
class _Watch:
    """Follows one contender until it reaches the target."""

    plan: Plan
    contender: str
    group: Group
    tell: Emit

    def is_over(self, loop: Loop) -> bool:
        goal = GOALS[self.plan.model]
        return loop.tested == loop.step and goal.reached(loop.score, self.plan.target)

    def stepped(self, loop: Loop) -> None:
        self.tell({"record": "step", "step": loop.step, "seconds": sum(loop.seconds)})

    def tested(self, loop: Loop) -> None:
        workers = self.group.workers
        payload, wire = self.group.sum(loop.entry.sent(workers), loop.wire or 0.0)
        self.tell(
            {
                "record": "point",
                "contender": self.contender,
                "step": loop.step,
                "seconds": loop.clock,
                "score": loop.score,
                "payload": payload / workers,
                "wire": None if loop.wire is None else wire / workers,
            }
        )
