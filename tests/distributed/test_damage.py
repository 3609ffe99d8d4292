"""One flipped bit on the way to one rank: all ranks raise alike, nothing changes, training goes on.

`tests/test_damage.py` does the same to every part of a message without processes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw
from sparsewire.collectives import Reduce, Request
from sparsewire.message import HEADER_BYTES, VERDICT_BYTES

from ..cluster import Cluster
from .training import CAP, loss_of, make_model, numbers, sgd, train_ddp

STEP, BUCKET, STEPS = 1, 1, 4


class Noise:
    """Flips one bit in the answer to the payload of one bucket, once."""

    def __init__(self, wire: sw.Wire, sender: int) -> None:
        self._wire, self._sender = wire, sender
        self._answer = wire.group.answer
        self._payloads = 0
        self.flips = 0
        wire.group.answer = self.answer  # type: ignore[method-assign]

    def answer(self, request: Request) -> Any:
        answer = self._answer(request)
        is_sum = isinstance(request, Reduce)
        if not is_sum and request.payload.numel() in (HEADER_BYTES, VERDICT_BYTES):
            return answer
        self._payloads += 1
        if self._payloads - 1 == BUCKET:
            target = answer if is_sum else answer[self._sender]
            target.view(torch.uint8)[9] ^= 16
            self.flips += 1
        return answer

    def stop(self) -> None:
        self._wire.group.answer = self._answer  # type: ignore[method-assign]


@dataclass
class Outcome:
    """What one rank saw."""

    message: str
    error: sw.SparsewireError | None
    flips: int
    memory_unchanged: bool
    weights_unchanged: bool
    weights: torch.Tensor


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        torch.equal(tensor, other["memory"][name][field])
        for name, fields in one["memory"].items()
        for field, tensor in fields.items()
    )


def _damaged(scheme: str, sender: int) -> Outcome:
    """Train; at one step rank 1 receives one bit of one bucket wrong, and the step is repeated."""
    rank = dist.get_rank()
    model = DDP(make_model(), bucket_cap_mb=CAP)
    optimizer = sgd(model)
    wire = sw.attach(model, scheme)
    message, flips, memory_unchanged, weights_unchanged = "", 0, False, False
    for step in range(STEPS):
        if step == STEP:
            kept, before = copy.deepcopy(wire.state_dict()), numbers(model).clone()
            noise = Noise(wire, sender) if rank == 1 else None
            try:
                loss_of(model, rank, step).backward()
            except RuntimeError as error:
                message = str(error)
            if noise is not None:
                noise.stop()
                flips = noise.flips
            memory_unchanged = _same(kept, wire.state_dict()) and wire.steps == step
            weights_unchanged = torch.equal(before, numbers(model))
            optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    error, steps = wire.error, wire.steps
    wire.detach()
    assert steps == STEPS
    return Outcome(message, error, flips, memory_unchanged, weights_unchanged, numbers(model))


def _check(two: Cluster, scheme: str, sender: int, *words: str) -> None:
    outcomes = two.run(_damaged, scheme, sender)
    undamaged = two.run(train_ddp, scheme, STEPS)
    assert [outcome.flips for outcome in outcomes] == [0, 1]
    for outcome, expected in zip(outcomes, undamaged, strict=True):
        for text in (outcome.message, str(outcome.error)):
            for word in (*words, f"at step {STEP}, bucket {BUCKET}", "no memory changed"):
                assert word in text
        assert type(outcome.error) is sw.DamageError
        assert outcome.memory_unchanged
        assert outcome.weights_unchanged
        assert torch.equal(outcome.weights, outcomes[0].weights)
        assert torch.equal(outcome.weights, expected)  # as if nothing had happened


@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("scheme", ["TopK(0.05)", "Scheme(Threshold(0.05), values=TwoBit())"])
def test_a_message_with_a_flipped_bit(two: Cluster, scheme: str, sender: int) -> None:
    _check(
        two,
        scheme,
        sender,
        f"the message of rank {sender} that rank 1 received",
        "its checksum does not match",
    )


@pytest.mark.parametrize("scheme", ["RandomK(0.05)", "Scheme(RandomK(0.05), values=BFloat16())"])
def test_a_sum_with_a_flipped_bit(two: Cluster, scheme: str) -> None:
    _check(two, scheme, 0, "the sum that rank", "is not what the others hold")
