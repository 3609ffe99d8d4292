"""Who takes part: sparsewire's schemes, what torch offers instead, and no exchange at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ..adapters.ddp import Wire, attach
from ..scheme import as_scheme

COMPUTE = "compute alone"
DENSE = "dense DDP"
Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]

_BUCKETS_OF_DDP = 25  # MiB
_ONE_BUCKET = 1 << 20  # MiB: torch's PowerSGD hangs on Gloo with more than one


@dataclass(frozen=True)
class Peer:
    """Another way to exchange gradients under DDP."""

    hook: Hook
    state: Callable[[], object]
    bucket_mb: int = _BUCKETS_OF_DDP
    warm_up: int = 2  # steps before it is itself; DDP rebuilds its buckets after the first


def _low_rank(rank: int) -> Peer:
    def state() -> object:
        return powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )

    return Peer(powerSGD_hook.powerSGD_hook, state, _ONE_BUCKET, warm_up=4)


def _nothing() -> None:
    return None


PEERS: dict[str, Peer] = {
    DENSE: Peer(default_hooks.allreduce_hook, _nothing),
    "fp16 hook": Peer(default_hooks.fp16_compress_hook, _nothing),
    "bf16 hook": Peer(default_hooks.bf16_compress_hook, _nothing),
    "PowerSGD rank 1": _low_rank(1),
    "PowerSGD rank 4": _low_rank(4),
}


def canonical(text: str) -> str:
    """The name of a contender as it stands in tables, from what a person typed."""
    for name in (COMPUTE, *PEERS):
        if text.strip().lower() == name.lower():
            return name
    return str(as_scheme(text))


@dataclass
class Entry:
    """A contender at work on a model."""

    model: nn.Module
    warm_up: int
    starts: list[float]  # when the exchange of each bucket of this step was asked for
    wire: Wire | None = None

    def leave(self) -> None:
        """Free the model for the next one."""
        if self.wire is not None:
            self.wire.detach()


def enter(name: str, model: nn.Module, clock: Callable[[], float], timeout: float) -> Entry:
    """Set `model` up for the contender called `name`."""
    starts: list[float] = []
    if name == COMPUTE:
        return Entry(model, 2, starts)
    peer = PEERS.get(name)
    ddp = DistributedDataParallel(
        model,
        bucket_cap_mb=peer.bucket_mb if peer else _BUCKETS_OF_DDP,
        init_sync=False,  # all ranks built the same, and the network is slow
        gradient_as_bucket_view=True,  # one copy of the gradient less, whoever exchanges it
    )
    if peer is None:
        return Entry(ddp, 3, starts, attach(ddp, name, timeout=timeout))

    hook = peer.hook

    def timed(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
        starts.append(clock())
        return hook(state, bucket)

    ddp.register_comm_hook(peer.state(), timed)
    return Entry(ddp, peer.warm_up, starts)
