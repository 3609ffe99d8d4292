"""Checkpoints: stop after any step, and go on as if never stopped.

Run it twice: the second run goes on where the first one stopped. Every rank saves what it has not
sent yet, so each of them writes a file of its own.

    torchrun --nproc-per-node 2 examples/resume.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw

FOLDER = Path(tempfile.gettempdir()) / "sparsewire-resume"
STEPS = 60  # of one run


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
    own = FOLDER / f"rank-{dist.get_rank()}.pt"
    first = 0
    if own.exists():
        state = torch.load(own)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        wire.load_state_dict(state["wire"])
        first = state["step"]
    for step in range(first, first + STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "wire": wire.state_dict(),
        "step": first + STEPS,
    }
    FOLDER.mkdir(exist_ok=True)
    unfinished = own.with_suffix(".part")
    torch.save(state, unfinished)
    unfinished.replace(own)  # so that a crash leaves the old checkpoint or the new one
    if dist.get_rank() == 0:
        print(f"steps {first} to {first + STEPS}: loss {loss.item():.3f}, saved in {FOLDER}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
