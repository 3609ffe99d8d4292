"""One rank of a benchmark, launched as `python -m sparsewire.tools.cli.timekeeper FOLDER`."""

from __future__ import annotations

from typing import Any

from .process import Join, serve
from .records import Emit


def _work(orders: dict[str, Any], join: Join, emit: Emit) -> None:
    import torch

    from ..bench.plan import Plan
    from ..bench.rank import take_turns
    from ..bench.setting import cores

    plan = Plan.from_dict(orders)
    group = join(plan.timeout)
    torch.set_num_threads(max(1, cores() // group.workers))
    take_turns(plan, emit)
    group.leave()


if __name__ == "__main__":
    serve(_work)
