"""AdamW: each rank's optimizer steps on its own gradient, and updates are exchanged.

torchrun --nproc-per-node 2 examples/adamw.py
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheme = sw.Scheme(sw.TopK(0.01), values=sw.TwoBit())
    wire = sw.attach(model, scheme, optimizer=optimizer, communicate="updates")
    for step in range(100):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of this rank's own gradient
        optimizer.step()  # updates are exchanged in here
        if dist.get_rank() == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    model.eval()  # from here on the model computes with the weights that all ranks share
    inputs, targets = batch(-1)
    right = (model.module(inputs).argmax(1) == targets).float().mean()
    if dist.get_rank() == 0:
        print(f"accuracy {right:.2f}", wire.report(), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
