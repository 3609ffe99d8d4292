"""One rank of a race, launched as `python -m sparsewire.tools.cli.racer FOLDER`."""

from __future__ import annotations

from typing import Any

from .process import Join, serve
from .records import Emit


def _work(orders: dict[str, Any], join: Join, emit: Emit) -> None:
    import torch

    from ..bench.race.plan import Plan
    from ..bench.race.rank import run
    from ..bench.setting import cores

    plan = Plan.from_dict(orders)
    group = join(plan.timeout)
    torch.set_num_threads(max(1, cores() // group.workers))
    run(plan, emit)
    group.leave()


if __name__ == "__main__":
    serve(_work)
