"""The contenders: sparsewire's schemes, torch's own hooks, and no exchange at all."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from sparsewire.adapters.attach import attach
from sparsewire.adapters.base import Attached
from sparsewire.errors import SchemeError
from sparsewire.notation import nearest, short
from sparsewire.report import dense_traffic
from sparsewire.scheme import as_scheme

COMPUTE = "compute alone"
DENSE = "dense DDP"
Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]

_ONE_BUCKET = 1 << 20  # MiB: torch's PowerSGD hangs on Gloo with more than one


@dataclass(frozen=True)
class Peer:
    """Another way to exchange gradients under DDP.

    `adds` is the type of number that the backend must be able to add up, and `warm_up` the steps
    before it is itself; DDP rebuilds its buckets after the first.
    """

    hook: Hook
    state: Callable[[], Any] = lambda: None
    adds: torch.dtype = torch.float32
    bucket_mb: int | None = None  # None: as DDP likes it
    warm_up: int = 2
    sends: bool = True


def _low_rank(rank: int) -> Peer:
    def state() -> powerSGD_hook.PowerSGDState:
        return powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )

    return Peer(powerSGD_hook.powerSGD_hook, state, bucket_mb=_ONE_BUCKET, warm_up=4)


def _exchange_nothing(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
    """Leave every rank's gradient as it is, to measure the cost of DDP itself."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


PEERS: dict[str, Peer] = {
    DENSE: Peer(default_hooks.allreduce_hook),
    "fp16 hook": Peer(default_hooks.fp16_compress_hook, adds=torch.float16),
    "bf16 hook": Peer(default_hooks.bf16_compress_hook, adds=torch.bfloat16),
    "PowerSGD rank 1": _low_rank(1),
    "PowerSGD rank 4": _low_rank(4),
    "DDP, no exchange": Peer(_exchange_nothing, sends=False),
}
SHORT = dict(
    zip(("dense", "fp16", "bf16", "powersgd-1", "powersgd-4", "nothing"), PEERS, strict=True)
)
"""The peers by the names that are easy to type."""


def peer(text: str) -> str:
    """Return the name of a peer in tables, given what a user typed."""
    typed = text.strip().lower()
    known = {**SHORT, **{name.lower(): name for name in PEERS}}
    if typed not in known:
        raise SchemeError(f"there is no peer called {text}; {nearest(typed, SHORT)}")
    return known[typed]


def scheme(text: str) -> str:
    """Return the name of a scheme in tables, given what a user typed."""
    every, given = _split(text.strip())
    chosen = short(repr(as_scheme(given)))
    if every is None:
        return chosen
    if not every:
        raise SchemeError("updates every 0 exchanges nothing: every is at least 1")
    return f"updates every {every} {chosen}" if every > 1 else f"updates {chosen}"


def _split(name: str) -> tuple[int | None, str]:
    """Return after how many steps updates are exchanged, None for gradients; and the scheme."""
    found = re.match(r"updates (?:every (\d+) )?\s*", name)
    return (int(found[1] or 1), name[found.end() :]) if found else (None, name)


def kind(name: str) -> str:
    """Return the kind of a contender: "floor", which exchanges nothing, "peer" or "scheme"."""
    if name == COMPUTE or (name in PEERS and not PEERS[name].sends):
        return "floor"
    return "peer" if name in PEERS else "scheme"


class Entry:
    """A contender at work on a model: `model` is what to train, `starts` when the exchange of each
    bucket of a step was asked for, if the contender does not tell more than that. `optimizer` is
    the one that will step the model.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clock: Callable[[], float],
        timeout: float,
    ) -> None:
        self.model = model
        self.starts: list[float] = []
        self.warm_up = 2
        self.wire: Attached | None = None
        self._peer = PEERS.get(name)
        self._state: Any = None
        self._values = 0  # that DDP handed over
        self._sizes: list[int] = []  # of the buckets of the last step
        if name == COMPUTE:
            return
        self.model = ddp = DistributedDataParallel(
            model,
            bucket_cap_mb=self._peer.bucket_mb if self._peer else None,
            init_sync=False,  # all ranks built the same, and the network is slow
            gradient_as_bucket_view=True,  # one copy of the gradient less, whoever exchanges it
        )
        if self._peer is None:
            self.warm_up = 3
            every, text = _split(name)
            what: dict[str, Any] = {"communicate": "gradients"}
            if every is not None:
                what = {"communicate": "updates", "every": every}
            self.wire = attach(ddp, text, optimizer=optimizer, timeout=timeout, **what)
        else:
            self.warm_up = self._peer.warm_up
            self._state = self._peer.state()
            ddp.register_comm_hook(self._state, self._timed(self._peer.hook, clock))

    def _timed(self, hook: Hook, clock: Callable[[], float]) -> Hook:
        def timed(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
            self.starts.append(clock())
            if bucket.index() == 0:
                self._sizes.clear()
            self._sizes.append(bucket.buffer().numel())
            self._values += bucket.buffer().numel()
            return hook(state, bucket)

        return timed

    def sent(self, world_size: int) -> int:
        """Return the payload bytes that this rank has sent so far; for a peer, those of a ring."""
        if self.wire is not None:
            return self.wire.counters.bytes_sent
        if self._peer is None or not self._peer.sends:
            return 0
        if isinstance(self._state, powerSGD_hook.PowerSGDState):
            return dense_traffic(self._state.total_numel_after_compression, world_size, 4)
        return dense_traffic(self._values, world_size, self._peer.adds.itemsize)

    def buckets(self) -> list[dict[str, tuple[int, ...]]]:
        """Return the buckets of the last step by name and shape; for a peer, their sizes alone."""
        if self.wire is None:
            return [{"values": (size,)} for size in self._sizes]
        return [
            {span.name: span.shape for span in params} for params in self.wire.counters.accumulated
        ]

    def forget_buckets(self) -> None:
        """After warm-up: DDP cuts its buckets anew after the first step."""
        if self.wire is not None:
            self.wire.counters.accumulated.clear()

    def leave(self) -> None:
        """Detach from the model, so that the next contender can use it."""
        if self.wire is not None:
            self.wire.detach()
        self.model.zero_grad()  # they lie in buckets
        del self.model, self.wire, self._state
        gc.collect()  # DDP acts on the model for as long as it lives, and it is part of a cycle


def interface_bytes() -> int | None:
    """Return the bytes that this host's network interface has sent; None on a shared interface."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if name == "lo":
        return None
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        interface, _, numbers = line.partition(":")
        if interface.strip() == name:
            return int(numbers.split()[8])
    return None
