"""Sparse gradients under DDP: one percent of every gradient is sent.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw


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
    for step in range(100):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # gradients are exchanged in here
        optimizer.step()
        if dist.get_rank() == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        print(wire.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
