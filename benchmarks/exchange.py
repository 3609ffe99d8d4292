"""What one rank's part of an exchange costs, as multiples of copying the same gradient.

    python benchmarks/exchange.py [--size 11.17e6] [--device cuda] [--workers 4]

Times are medians of interleaved repeats in one process, so that the ratios compare. "plain" is what
one would write in a few lines of torch: add, abs().topk, gather, scatter.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import sparsewire as sw
from sparsewire.collectives import Reduce, Request
from sparsewire.desk import Call
from sparsewire.engine import Exchange
from sparsewire.groups.simulated import answer_all
from sparsewire.ledger import Ledger
from sparsewire.message import (
    FINE,
    HEADER_BYTES,
    VERDICT_BYTES,
    Context,
    Header,
    pack_verdict,
    seal,
)
from sparsewire.meter import Meter

SCHEMES = (
    "Dense()",
    "TopK(0.01)",
    "Threshold(0.01)",
    "RandomK(0.01)",
    "BlockRandomK(0.01)",
    "Scheme(TopK(0.01), scope='global')",
    "Scheme(TopK(0.01), values=BFloat16())",
)


def resnet18_like(size: int) -> dict[str, tuple[int, int]]:
    """Twenty matrices whose sizes double every four, about `size` values in all."""
    weights = [2.0 ** (2 * (layer // 4)) for layer in range(20)]
    return {
        f"layer{i}": (max(2, round(size * w / sum(weights) / 64)), 64)
        for i, w in enumerate(weights)
    }


class Peers:
    """The other ranks, who send what this one did in its first exchange: made once, not timed."""

    def __init__(self, exchange: Exchange, world: int) -> None:
        self._exchange, self._world = exchange, world
        self._messages: list[torch.Tensor] = []
        self._context: Context = exchange.context(Call(0, 0, world))
        fine = torch.tensor(FINE)
        self._verdicts = [
            pack_verdict(fine, fine, self._context.key(rank)) for rank in range(world)
        ]

    def answer(self, request: Request) -> Any:
        """What this rank gets; a header and a sealed message name their sender."""
        size = request.payload.numel()
        if isinstance(request, Reduce):
            return answer_all([request] * self._world)[0]
        if size == VERDICT_BYTES:
            return self._verdicts
        if size == HEADER_BYTES:
            own = Header.unpack(request.payload, 0)
            return [replace(own, rank=rank).pack() for rank in range(self._world)]
        if not self._messages:
            self._messages = [
                seal(request.payload.clone(), self._context.key(rank))
                for rank in range(1, self._world)
            ]
        return [request.payload, *self._messages]


def exchange_once(
    exchange: Exchange, gradient: torch.Tensor, ledger: Ledger, peers: Peers, world: int
) -> None:
    """One exchange by rank 0, committed."""
    before, after = ledger.open(0, exchange.segments, gradient.dtype, gradient.device)
    run = exchange.run(gradient, before, after, Call(0, 0, world), Meter())
    answer = None
    while True:
        try:
            answer = peers.answer(run.send(answer))
        except StopIteration:
            break
    ledger.commit()


def _restored_exchange(
    exchange: Exchange,
    gradient: torch.Tensor,
    source: torch.Tensor,
    ledger: Ledger,
    peers: Peers,
    world: int,
) -> None:
    exchange_once(exchange, gradient.copy_(source), ledger, peers, world)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def plain_topk(gradient: torch.Tensor, residual: torch.Tensor, count: int) -> None:
    """The few lines of torch that most projects have."""
    residual.add_(gradient)
    indices = residual.abs().topk(count).indices
    values = residual[indices]
    residual[indices] = 0
    gradient.zero_()
    gradient[indices] = values


def median_times(jobs: dict[str, Callable[[], None]], repeats: int, cuda: bool) -> dict[str, float]:
    """Seconds per job, all jobs taking turns."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(repeats + 1):
        for name, job in jobs.items():
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            job()
            if cuda:
                torch.cuda.synchronize()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", type=float, default=11.17e6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes = resnet18_like(int(options.size))
    size = sum(rows * columns for rows, columns in shapes.values())
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(size, generator=generator).to(options.device)
    gradient, other = source.clone(), torch.zeros_like(source)

    jobs: dict[str, Callable[[], None]] = {
        "copy": lambda: _copy(other, source),
        "plain topk": lambda: plain_topk(gradient.copy_(source), other, size // 100),
    }
    for text in SCHEMES:
        scheme = sw.parse(text).at(0)
        exchange = Exchange(scheme, scheme.cut(shapes))
        jobs[text] = partial(
            _restored_exchange,
            exchange,
            gradient,
            source,
            Ledger(scheme.memory.fields, shapes),
            Peers(exchange, options.workers),
            options.workers,
        )
    times = median_times(jobs, options.repeats, options.device != "cpu")
    copy = times["copy"]
    print(
        f"{size:,} values on {options.device}, {options.workers} workers, one thread, torch "
        f"{torch.__version__}; one copy = {1e3 * copy:.2f} ms"
    )
    print(f"{'scheme':<42} copies")
    for name, seconds in times.items():
        # every job but the copy itself also restores its gradient first: one copy
        extra = 0.0 if name == "copy" else 1.0
        print(f"{name:<42} {seconds / copy - extra:6.1f}")


if __name__ == "__main__":
    main()
