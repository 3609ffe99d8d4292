"""One rank of a soak: it trains, or attaches and detaches, until it is told to end.

python -m tests.chaos.soak_rank training|attaching RANK WORLD PORT FOLDER
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw

from ..distributed.training import CAP, loss_of, make_model
from .zygote import die_with

PACE = 0.005  # seconds between two steps


class Training:
    """A model that is trained, by gradients under DDP or by updates every second step."""

    def __init__(self, rank: int, is_updates: bool) -> None:
        self.rank, net = rank, make_model()
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        self.model: nn.Module = net if is_updates else DDP(net, bucket_cap_mb=CAP)
        self.wire = (
            sw.attach(net, "TopK(0.05)", optimizer=self.optimizer, every=2)
            if is_updates
            else sw.attach(self.model, "TopK(0.05)")
        )

    def step(self, number: int) -> None:
        """Take one step."""
        self.optimizer.zero_grad()
        loss_of(self.model, self.rank, number).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def main() -> None:
    die_with(os.getppid())
    phase, rank, world, port, place = sys.argv[1:]
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world))
    folder, count = Path(place), 0
    trained = [Training(int(rank), is_updates) for is_updates in (False, True)]
    while not _is_over(folder):
        if phase == "training":
            trained[count % 2].step(count)
        else:
            _attach_once(int(rank), count)
        count += 1
        if count % 10 == 0:
            beside = folder / f".rank-{rank}"
            beside.write_text(str(count))
            beside.replace(folder / f"rank-{rank}")
        time.sleep(PACE)
    os._exit(0)


def _is_over(folder: Path) -> bool:
    """Whether all ranks end now: they ask in every round, so that none waits for another."""
    mine = torch.tensor([float((folder / "over").exists())])
    dist.all_reduce(mine)
    return bool(mine)


def _attach_once(rank: int, count: int) -> None:
    """Attach a model, take two steps and detach, or, every fourth time, only drop the model."""
    training = Training(rank, is_updates=bool(count % 2))
    for step in range(2):
        training.step(step)
    if count % 4 < 3:
        training.wire.detach()
    del training
    gc.collect()
    dist.barrier()  # groups of a model that was only dropped are free on all ranks by then


if __name__ == "__main__":
    main()
