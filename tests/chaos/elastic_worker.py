"""Training under `torchrun --nnodes 1:4`, with as many ranks as there are at the moment.

    torchrun --nnodes 1:4 … -m tests.chaos.elastic_worker FOLDER

It saves every few steps and goes on from the newest checkpoint, whoever wrote it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw
from sparsewire.tools.cli import checkpoint

from .rank import Diary, Identity, digest
from .zygote import die_with

EVERY = 10  # steps between two checkpoints
PACE = 0.01  # seconds that a step takes at least
BATCH = 24  # examples of all ranks together, whatever their number
TEST = 4096


def examples(step: int, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return examples of a step's batch, whose targets a teacher chooses."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(TEST, 32, generator=generator)[first : first + count]
    teacher = torch.randn(32, 8, generator=torch.Generator().manual_seed(99))
    return inputs, (inputs @ teacher).argmax(dim=1)


def _flat(states: list[dict[str, Any]]) -> Tensor:
    """Return the mean over ranks of what they have not sent."""
    flats = [
        torch.cat([fields["residual"].reshape(-1) for _, fields in sorted(s["memory"].items())])
        for s in states
    ]
    return torch.stack(flats).double().mean(dim=0)


def make_net() -> nn.Module:
    """Return the model at its beginning."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


@torch.no_grad()
def final_loss(net: nn.Module) -> float:
    """Return the loss on examples that no step trains on."""
    inputs, targets = examples(1 << 30, 0, TEST)
    return float(nn.functional.cross_entropy(net(inputs), targets))


class Trainer:
    """One rank, for as long as the number of ranks stays the same."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank, self.world = folder, dist.get_rank(), dist.get_world_size()
        self.diary = Diary(folder / f"worker-{os.getpid()}.jsonl")
        self.net = make_net()
        self.model = DDP(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.2)
        self.wire = sw.attach(self.model, "TopK(0.05)", timeout=30)
        self.step, self.saved = 0, 0  # saved by these ranks
        self.disk = folder / "checkpoints"

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        found = checkpoint.newest(self.disk)
        lost, before = 0.0, self.world
        if found is not None:
            common = found.load(checkpoint.MODEL)
            before = found.workers
            states = [found.load(checkpoint.wire_file(rank)) for rank in range(before)]
            self.wire.load_state_dict(states, on_world_size_change="resize")
            self.net.load_state_dict(common["model"])
            self.optimizer.load_state_dict(common["optimizer"])
            self.step = int(common["step"])
            saved, mean = _flat(states), _flat([self.wire.state_dict()])
            dist.all_reduce(mean)
            lost = float((mean / self.world - saved).norm() / saved.norm().clamp(min=1e-30))
        self.diary(
            "resumed", rank=self.rank, world=self.world, before=before, n=self.step, lost=lost
        )

    def _is_over(self) -> bool:
        """Whether the last step was taken, which is known to all long before."""
        last = self.folder / "steps"
        return last.exists() and self.step >= int(last.read_text())

    def train(self) -> None:
        """Train to the end."""
        share = BATCH // self.world  # 24 is a multiple of 1, 2, 3 and 4
        while not self._is_over():
            inputs, targets = examples(self.step, self.rank * share, share)
            loss = nn.functional.cross_entropy(self.model(inputs), targets)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.step += 1
            self._settle()
            if self.step % EVERY == 0:
                self._save()
            time.sleep(PACE)
        self.diary(
            "done", weights=digest(self.net.state_dict()), n=self.step, loss=final_loss(self.net)
        )
        self.wire.detach()

    def _save(self) -> None:
        """Write this rank's part of a checkpoint."""
        name = checkpoint.wire_file(self.rank)
        checkpoint.write_file(self.disk, self.step, name, self.wire.state_dict())
        if self.rank == 0:
            common = {
                "step": self.step,
                "model": self.net.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            checkpoint.write_file(self.disk, self.step, checkpoint.MODEL, common)
        self.saved = self.step
        self.diary("saved", rank=self.rank, world=self.world, n=self.step)

    def _settle(self) -> None:
        """Write the manifest after another step, in which all ranks have taken part."""
        if self.rank or not self.saved or self.step != self.saved + 1:
            return
        folder = self.disk / f"step-{self.saved:08d}"
        names = [checkpoint.MODEL, *map(checkpoint.wire_file, range(self.world))]
        files = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
        plan = cast(Any, Identity("elastic"))
        checkpoint.complete(self.disk, self.saved, files, plan, self.world)


def main() -> None:
    die_with(os.getppid())  # or it would train on when its agent is killed
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer = Trainer(Path(sys.argv[1]))
    trainer.resume()
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
