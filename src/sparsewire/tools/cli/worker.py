"""One rank of a training: joins the group, trains what is planned, and leaves without a mess.

`python -m sparsewire.tools.cli.worker FOLDER` is what the launcher starts; a process that torchrun
started calls `take_part` itself.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..bench.setting import cores
from .plan import Plan
from .process import Join, StepError, serve
from .records import Emit

if TYPE_CHECKING:
    from .group import Group, StopSign


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


def _work(orders: list[dict[str, Any]], join: Join, emit: Emit) -> None:
    plans = [Plan.from_dict(fields) for fields in orders]
    take_part(plans, lambda: join(plans[0].timeout), emit)


if __name__ == "__main__":
    serve(_work)
