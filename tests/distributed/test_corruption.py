"""One flipped bit on the way to one rank: all ranks raise alike, nothing changes, training goes on.

`tests/test_corruption.py` does the same to every part of a message without processes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw
from sparsewire.groups.transport import Work
from sparsewire.message import HEADER_BYTES, STATUS_BYTES

from ..cluster import Cluster
from .training import CAP, loss_of, make_model, numbers, sgd, train_ddp

STEP, BUCKET, STEPS = 1, 1, 4


class Noise:
    """Flips one bit in what arrives from one sender, once: by default for the second bucket.

    `leg`: of a message, or of a sum the shares that are to be added ("first") or were ("second"),
    or of what a leader shows ("shown").
    """

    def __init__(self, wire: sw.SparseHookState, sender: int, leg: str, arrival: int) -> None:
        self._group, self._sender, self._arrival = wire.group, sender, arrival
        self._arrivals, self.flips = 0, 0
        self._transport = wire.group._transport
        self._gather, self._scatter = self._transport.gather, self._transport.deliver
        self._show = self._transport.show
        if leg == "shown":
            self._transport.show = self._shown
        elif leg == "first":
            self._transport.deliver = self._scattered
        else:
            self._transport.gather = self._gathered

    def _gathered(self, output: Tensor, payload: Tensor) -> Work:
        work = self._gather(output, payload)
        work.wait()
        if payload.numel() not in (HEADER_BYTES, STATUS_BYTES):
            self._arrived(output.view(self._group.size, -1))
        return work

    def _scattered(self, output: Tensor, rows: Tensor) -> Work:
        work = self._scatter(output, rows)
        work.wait()
        self._arrived(output)
        return work

    def _shown(self, payload: Tensor, root: int) -> Work:
        assert root == self._sender
        work = self._show(payload, root)
        work.wait()
        self._arrived(payload.expand(self._group.size, -1))
        return work

    def _arrived(self, rows: Tensor) -> None:
        if self._arrivals == self._arrival:
            rows[self._sender, 9] ^= 16
            self.flips += 1
        self._arrivals += 1

    def stop(self) -> None:
        self._transport.gather, self._transport.deliver = self._gather, self._scatter
        self._transport.show = self._show


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


def _damaged(scheme: str, sender: int, leg: str, arrival: int) -> Outcome:
    """Train; at one step a rank receives one bit of one bucket wrong, and the step is repeated."""
    rank = dist.get_rank()
    model = DDP(make_model(), bucket_cap_mb=CAP)
    optimizer = sgd(model)
    wire = sw.attach(model, scheme)
    message, flips, memory_unchanged, weights_unchanged = "", 0, False, False
    for step in range(STEPS):
        if step == STEP:
            kept, before = copy.deepcopy(wire.state_dict()), numbers(model).clone()
            noise = Noise(wire, sender, leg, arrival) if rank != sender else None
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


def _check(two: Cluster, scheme: str, sender: int, leg: str, arrival: int = BUCKET) -> None:
    """What one rank sent arrives damaged at the other."""
    received = f"the message of rank {sender} that rank {1 - sender} received"
    words = received, "its checksum does not match"
    outcomes = two.run(_damaged, scheme, sender, leg, arrival)
    undamaged = two.run(train_ddp, scheme, STEPS)
    assert [outcome.flips for outcome in outcomes] == [sender, 1 - sender]
    for outcome, expected in zip(outcomes, undamaged, strict=True):
        for text in (outcome.message, str(outcome.error)):
            for word in (*words, f"at step {STEP}, bucket {BUCKET}", "no residual changed"):
                assert word in text
        assert type(outcome.error) is sw.errors.CorruptMessageError
        assert outcome.memory_unchanged
        assert outcome.weights_unchanged
        assert torch.equal(outcome.weights, outcomes[0].weights)
        assert torch.equal(outcome.weights, expected)  # as if nothing had happened


@pytest.mark.parametrize("scheme", ["TopK(0.05)", "Scheme(Threshold(0.05), values=TwoBit())"])
def test_a_message_with_a_flipped_bit(two: Cluster, scheme: str) -> None:
    _check(two, scheme, 0, "")


@pytest.mark.parametrize("leg", ["first", "second"])
@pytest.mark.parametrize("scheme", ["RandomK(0.05)", "Scheme(RandomK(0.05), values=BFloat16())"])
def test_a_share_of_a_sum_with_a_flipped_bit(two: Cluster, scheme: str, leg: str) -> None:
    _check(two, scheme, 0, leg)


@pytest.mark.parametrize("leg", ["first", "second"])
def test_norms_with_a_flipped_bit(two: Cluster, leg: str) -> None:
    """Every bucket has two sums: of norms, and then of values."""
    _check(two, "TopBlock(0.05, block=16)", 0, leg, arrival=2 * BUCKET)


def test_a_leaders_message_with_a_flipped_bit(two: Cluster) -> None:
    _check(two, "LeaderTopK(0.05)", STEP % 2, "shown")


def test_what_a_rank_names_with_a_flipped_bit(two: Cluster) -> None:
    """Every bucket has two messages: of coordinates, and then of values."""
    scheme = "Scheme(UnionTopK(0.05), collective=AllGather())"
    _check(two, scheme, 0, "", arrival=2 * BUCKET)
