"""A script whose last exchange never ends, since one rank stops training: `test_leaving` runs it.

    survivor.py INTRA_NODE VICTIM STEPS TIMEOUT

Even ranks end by the exception, odd ones by `sys.exit(3)`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw


class Slow:
    """Keeps the interpreter in its last phase, in which a thread that comes back aborts it."""

    def __del__(
        self,
        write: Callable[[int, bytes], int] = os.write,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        write(1, b"the interpreter ends\n")
        sleep(1.0)


def main() -> None:
    intra_node, victim, steps = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    timeout = float(sys.argv[4])
    sw.attach(model, "TopK(0.05)", timeout=timeout, intra_node=intra_node or None)
    try:
        for step in range(steps + 1):
            loss = model(torch.randn(16, 64)).square().mean()
            if step == steps:
                print(f"rank {rank} is process {os.getpid()}", flush=True)
                if rank == victim:
                    time.sleep(1000)
            loss.backward()
    except RuntimeError as error:
        if rank % 2 == 0:
            raise
        print(error, file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    slow = Slow()
    main()
