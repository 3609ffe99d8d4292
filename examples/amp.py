"""Mixed precision: give the GradScaler to attach, so that all ranks skip the same steps.

torchrun --nproc-per-node 2 examples/amp.py
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
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    dist.init_process_group("nccl" if has_gpu else "gloo")
    if has_gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model = DDP(build().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    wire = sw.attach(model, sw.TopK(0.01), optimizer=optimizer, scaler=scaler)
    precision = torch.float16 if has_gpu else torch.bfloat16
    for step in range(100):
        inputs, targets = (each.to(device) for each in batch(step))
        optimizer.zero_grad()
        with torch.autocast(device.type, precision):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if dist.get_rank() == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}, scale {scaler.get_scale():g}")
    if dist.get_rank() == 0:
        print(wire.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
