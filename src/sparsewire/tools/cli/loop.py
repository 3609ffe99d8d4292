"""The one training loop: `demo`, `train`, `compare` and `bench train` all train with it.

Everything that a step depends on follows from the recipe and the step's number, apart from the
weights, the optimizer and the exchange's memory, which checkpoints keep.
"""

from __future__ import annotations

import math
from time import perf_counter
from typing import Protocol

from torch import nn

from sparsewire.errors import NonFiniteError
from sparsewire.report import plural

from ..bench.contenders import Entry, interface_bytes
from ..tasks.training import Task
from .errors import CommandError
from .group import Group


class Diverged(CommandError):
    """The loss or a gradient is no finite number any more, on all ranks alike."""


class Watch(Protocol):
    """Follows a training, and may end it."""

    def is_over(self, loop: Loop) -> bool:
        """Whether to stop; asked before each step, and the same on all ranks."""

    def stepped(self, loop: Loop) -> None:
        """A step is done."""

    def tested(self, loop: Loop) -> None:
        """The network was tested, for which the clock stood still."""


class Loop:
    """One rank's training with one contender, from the recipe's weights on.

    Attributes:
        step: how many steps are done.
        seconds: how long each of them took on this rank.
        clock: seconds of training until the last test, on the slowest rank.
        last_loss: of the last step, on this rank.
        loss: the mean over all ranks' steps between the last two tests.
        score: of the last test, at step `tested`.
        wire: bytes that passed the network interface so far, None if that is not known.
    """

    def __init__(self, task: Task, contender: str, group: Group, timeout: float) -> None:
        self.step, self.tested = 0, -1
        self.seconds: list[float] = []
        self.clock = 0.0
        self.last_loss = self.loss = self.score = math.nan
        self.wire: float | None = 0.0
        self.net = task.build()
        self.optimizer, self._schedule = task.recipe.optimize(self.net)
        self.entry = Entry(contender, self.net, self.optimizer, perf_counter, timeout)
        self._task, self._contender, self._group = task, contender, group

    def run(self, until: int, every: int, watch: Watch) -> None:
        """Train up to a step, with a test at every `every`-th of them and at the end.

        Raises:
            Diverged: a loss or gradient is no finite number.
        """
        while self.step < until and not watch.is_over(self):
            self._leg(min(until, self.step // every * every + every), watch)
            self.score = test(self.net, self._task, self._group)
            self.tested = self.step
            watch.tested(self)

    def _leg(self, until: int, watch: Watch) -> None:
        """The steps up to the next test, on the clock."""
        self._group.sum(0.0)  # all begin together
        before, begun, total = interface_bytes(), self.step, 0.0
        while self.step < until and not watch.is_over(self):
            self._train()
            total += self.last_loss
            watch.stepped(self)
        after, steps = interface_bytes(), self.step - begun
        if before is None or after is None or self.wire is None:
            self.wire = None
        else:
            self.wire += after - before
        self.clock += self._group.largest(sum(self.seconds[len(self.seconds) - steps :]))
        total, steps_of_all = self._group.sum(total, steps)
        self.loss = total / max(steps_of_all, 1)
        if not math.isfinite(self.loss):
            raise self._diverged("loss")

    def _train(self) -> None:
        """One step."""
        began = perf_counter()
        self.optimizer.zero_grad()
        loss = self._task.loss(self.entry.model, self.step)
        try:
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        except RuntimeError as error:
            # backward() loses the type of an error in an exchange; the wire keeps it.
            cause = self.entry.wire and self.entry.wire.error
            if isinstance(cause, NonFiniteError):
                raise self._diverged("gradient") from error
            raise cause or error from error
        self._schedule.step()
        self.last_loss = loss.item()
        self.step += 1
        self.seconds.append(perf_counter() - began)

    def _diverged(self, what: str) -> Diverged:
        recipe = self._task.recipe
        less = ", or less --momentum" if recipe.momentum else ""
        return Diverged(
            f"the {what} was no longer a finite number after {plural(self.step, 'step')} with "
            f"{self._contender}: try a smaller --lr than {recipe.lr:g}{less}"
        )


def test(net: nn.Module, task: Task, group: Group) -> float:
    """The mean score over all ranks' shares of the test set; the same on all ranks."""
    total, count = group.sum(*task.test(net))
    return total / count
