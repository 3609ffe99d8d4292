"""Gradient accumulation: four batches to a step, of which the last one exchanges.

torchrun --nproc-per-node 2 examples/accumulation.py
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw

BATCHES = 4  # to a step


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of ten clusters; every rank has its own."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(10, (32,), generator=generator)
    return centres[targets] + torch.randn(32, 64, generator=generator), targets


def main() -> None:
    dist.init_process_group("gloo")
    model = DDP(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    wire = sw.attach(model, sw.TopK(0.01), optimizer=optimizer)
    for step in range(40):
        optimizer.zero_grad()
        for part in range(BATCHES):
            inputs, targets = batch(BATCHES * step + part)
            with nullcontext() if part == BATCHES - 1 else model.no_sync():
                loss = nn.functional.cross_entropy(model(inputs), targets) / BATCHES
                loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {BATCHES * loss.item():.3f}")
    if dist.get_rank() == 0:
        print(f"{wire.steps} exchanges", wire.report(), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
