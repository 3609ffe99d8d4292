"""What an exchange computes and what it sends, as hashes that can be compared years later.

Gradients are small multiples of 2⁻¹⁰, so that sums do not depend on how a processor adds them up.
Of every message the digest is left out: it covers the version and the scheme's fingerprint, which
may change where the numbers do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw
from sparsewire.message import _LAYOUT, CHECKSUM_BYTES, HEADER_BYTES, MAGIC, STATUS_BYTES
from sparsewire.requests import Request

SHAPES = {"w": (48, 40), "conv": (16, 8, 3, 3), "small": (5, 6), "b": (48,), "one": (1,)}
STEPS = 4
WORKERS = 3
_KINDS = {"all_gather": "gather", "all_to_all": "deliver", "broadcast": "show"}  # in the corpus
Record = dict[str, Any]


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    """Heavy tails, so that coordinates differ in weight; equal magnitudes, so that ties count."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    made = {}
    for name, shape in SHAPES.items():
        noise = torch.randint(-64, 65, shape, generator=generator)
        made[name] = (noise**3 // 4096).float() / 1024
    return made


def fingerprint(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _residuals(memory: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """What a rank remembers, by field."""
    fields = sorted({field for kept in memory.values() for field in kept})
    return {
        field: fingerprint(*(memory[name][field] for name in SHAPES if field in memory[name]))
        for field in fields
    }


def trajectory(text: str) -> Record:
    """Means and memories of every step, with simulated workers."""
    states = [sw.functional.init(text, gradients(0, 0)) for _ in range(WORKERS)]
    record: Record = {"means": [], "memories": [], "bytes": []}
    before = 0
    for step in range(STEPS):
        made = [gradients(rank, step) for rank in range(WORKERS)]
        mean, states = sw.functional.simulate(made, states)
        record["means"].append(fingerprint(*(mean[name] for name in SHAPES)))
        record["memories"].append([_residuals(state.memory) for state in states])
        sent = states[0].counters.bytes_sent
        record["bytes"].append(sent - before)
        before = sent
    return record


def messages(text: str) -> list[list[Any]]:
    """What this rank sends, exchange by exchange, over a real group."""
    group = sw.groups.DistributedGroup()
    state = sw.functional.init(text, gradients(0, 0))
    with _tapped() as sent:
        for step in range(STEPS):
            _, state = sw.functional.exchange(gradients(group.rank, step), state, group)
    group.close()
    return sent


class _Exact(nn.Module):
    """A module whose gradients are the given numbers, whatever its parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterDict({n: torch.zeros(shape) for n, shape in SHAPES.items()})

    def forward(self, wanted: dict[str, Tensor]) -> Tensor:
        return torch.stack([(self.parts[n] * g).sum() for n, g in wanted.items()]).sum()


def buckets(text: str, intra_node: int | None) -> Record:
    """What this rank sends from DDP's buckets, the gradients it ends with, and its checkpoint."""
    model = DDP(_Exact(), bucket_cap_mb=0.004)
    wire = sw.attach(model, text, intra_node=intra_node)
    means = []
    with _tapped() as sent:
        for step in range(STEPS):
            model.zero_grad()
            model(gradients(dist.get_rank(), step)).backward()
            means.append(fingerprint(*(p.grad for p in model.parameters() if p.grad is not None)))
    memory = {
        name.removeprefix("parts."): kept for name, kept in wire.state_dict()["memory"].items()
    }
    wire.detach()
    return {"messages": sent, "means": means, "memory": _residuals(memory)}


@contextmanager
def _tapped() -> Iterator[list[list[Any]]]:
    """Write down what goes to other machines: how, and each row's size and content."""
    sent: list[list[Any]] = []
    plain = sw.groups.DistributedGroup.start

    def start(group: sw.groups.DistributedGroup, request: Request) -> Any:
        if request.group != "intra_node":
            rows = request.payload.view(-1, request.payload.shape[-1])
            own = request.op != "broadcast" or request.root == group.rank
            contents = map(_content, rows) if own else ["from another"]
            sent.append([_KINDS[request.op], rows.shape[1], *contents])
        return plain(group, request)

    with mock.patch.object(sw.groups.DistributedGroup, "start", start):
        yield sent


def _content(row: Tensor) -> str:
    """A message without its digest; of headers and verdicts the numbers that outlive versions."""
    data = row.cpu().numpy().tobytes()
    verdicts, rest = divmod(len(data), STATUS_BYTES)
    if not rest and data.startswith(b"\xff" * 16):
        return f"{verdicts} times nothing wrong"
    if len(data) == HEADER_BYTES and data.startswith(MAGIC):
        _, _, _, rank, _, step, bucket, _, _, length = _LAYOUT.unpack(data[: _LAYOUT.size])
        return f"header: rank {rank}, step {step}, bucket {bucket}, length {length}"
    return hashlib.sha256(data[:-CHECKSUM_BYTES]).hexdigest()[:16]
