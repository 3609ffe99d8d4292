"""Local steps without DDP: ranks train alone for 8 steps, then exchange what changed.

torchrun --nproc-per-node 2 examples/local_steps.py
"""

import torch
import torch.distributed as dist
from torch import nn

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
    model = build()  # any module; rank 0's weights are the first
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheme = sw.Scheme(sw.TopK(0.05), values=sw.TwoBit())
    wire = sw.attach(model, scheme, optimizer=optimizer, communicate="updates", every=8)
    for step in range(96):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()  # every eighth exchanges
        if dist.get_rank() == 0 and step % 24 == 23:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    with wire.shared_weights():
        total = sum(float(p.detach().double().sum()) for p in model.parameters())
    print(f"rank {dist.get_rank()} after {wire.steps} exchanges: weights add up to {total:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
