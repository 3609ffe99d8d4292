"""Small trainings that several tests share: the same numbers with DDP, and in one process."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw

CAP = 0.05  # MB: several buckets even for a small model


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, 96),
        nn.ReLU(),
        nn.Linear(96, 96),
        nn.LayerNorm(96),
        nn.ReLU(),
        nn.Linear(96, 96),
        nn.ReLU(),
        nn.Linear(96, 10),
    )


def batch(rank: int, step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (
        torch.randn(size, 64, generator=generator),
        torch.randint(0, 10, (size,), generator=generator),
    )


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return nn.functional.cross_entropy(model(inputs), targets)


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def numbers(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def digest(model: nn.Module) -> str:
    return hashlib.sha256(numbers(model).numpy().tobytes()).hexdigest()


def buckets_of(wire: sw.SparseHookState) -> list[tuple[str, ...]]:
    """The parameters of each bucket that was exchanged last."""
    return [names for _, names in wire._session._exchanges.values()]


def train_ddp(
    scheme: str | None,
    steps: int = 20,
    ddp: dict[str, Any] | None = None,
    attach: dict[str, Any] | None = None,
    momentum: float = 0.0,
) -> torch.Tensor:
    """Train with DDP on this rank; `scheme=None` is plain DDP. Returns the parameters."""
    options = {"bucket_cap_mb": CAP, **(ddp or {})}
    model = DDP(make_model(), **options)
    optimizer = sgd(model, momentum=momentum)
    wire = sw.attach(model, scheme, **(attach or {})) if scheme is not None else None
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
    if wire is not None:
        assert wire.steps == steps
        wire.detach()
    return numbers(model)


def train_simulated(
    scheme: str, world: int, steps: int = 20, momentum: float = 0.0
) -> torch.Tensor:
    """The same training with all workers in one process."""
    model = make_model()
    optimizer = sgd(model, momentum=momentum)
    named = dict(model.named_parameters())
    states = [sw.functional.init(scheme, named) for _ in range(world)]
    for step in range(steps):
        gradients = []
        for rank in range(world):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            gradients.append({name: copy.deepcopy(p.grad) for name, p in named.items()})
        mean, states = sw.functional.simulate(gradients, states)
        for name, parameter in named.items():
            parameter.grad = mean[name]
        optimizer.step()
    return numbers(model)
