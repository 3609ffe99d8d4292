"""What one rank alone finds corrupt breaks the group: all ranks learn of it, and none tries again.

`tests/simulation` does the same to every message without processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw
from sparsewire.groups.transport import Transport, Work
from sparsewire.message import HEADER_BYTES, STATUS_BYTES

from ..cluster import Cluster
from ..patience import patience
from .training import CAP, loss_of, make_model, numbers, sgd

TIMEOUT = 60.0  # which no rank waits for


@contextmanager
def flipping(transport: type[Transport] | Transport, sender: int, nbytes: int) -> Iterator[None]:
    """Flip one bit in every message of this size that this rank gathers from a sender."""
    plain = transport.gather

    def gather(*arguments: Any) -> Work:
        *_, output, payload = arguments
        work = plain(*arguments)
        if payload.numel() == nbytes:
            work.wait()
            output.view(-1, nbytes)[sender, 9] ^= 16
        return work

    transport.gather = gather  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        transport.gather = plain  # type: ignore[method-assign]


def _attach() -> tuple[DDP, torch.optim.Optimizer, sw.SparseHookState]:
    model = DDP(make_model(), bucket_cap_mb=CAP)
    wire = sw.attach(model, "Scheme(TopK(0.05), scope='global')", timeout=TIMEOUT)
    return model, sgd(model), wire


def _error_of(model: DDP, step: int) -> str:
    """The error that a backward pass raises, if any."""
    model.zero_grad()
    try:
        loss_of(model, dist.get_rank(), step).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def _corrupt(nbytes: int) -> tuple[list[str], float, int, Tensor]:
    """Rank 1 alone gets rank 0's header or status corrupt, in the third step."""
    model, optimizer, wire = _attach()
    for step in range(2):
        assert not _error_of(model, step)
        optimizer.step()
    began, texts = time.monotonic(), []
    if dist.get_rank() == 1:
        with flipping(wire.group._transport, 0, nbytes):
            texts.append(_error_of(model, 2))
    else:
        texts.append(_error_of(model, 2))
    texts += [_error_of(model, step) for step in (3, 4)]
    took, steps = time.monotonic() - began, wire.steps
    wire.detach()
    model, optimizer, wire = _attach()  # a new group
    for step in range(2):
        assert not _error_of(model, step)
        optimizer.step()
    wire.detach()
    return texts, took, steps, numbers(model)


def _check(results: list[Any], words: str) -> None:
    (others, took, _, weights), (texts, own_took, _, own_weights) = results
    assert took < patience(15)
    assert own_took < patience(15)
    assert words in texts[0]
    assert "the group is broken: restart all ranks" in texts[0]
    assert all("ExchangeError: " in text for text in [*texts, *others[1:]])
    assert "reported by rank 1" in others[1]
    assert words in others[1]
    assert torch.equal(weights, own_weights)


def test_a_corrupt_header_breaks_the_group(two: Cluster) -> None:
    results = two.run(_corrupt, HEADER_BYTES)
    _check(results, "what arrived from rank 0 is no header")
    assert [steps for _, _, steps, _ in results] == [2, 2]
    assert "ExchangeError: " in results[0][0][0]


def test_a_corrupt_status_breaks_the_group(two: Cluster) -> None:
    """The other rank has taken the step, and learns of it before the next one."""
    results = two.run(_corrupt, STATUS_BYTES)
    _check(results, "the status of rank 0 at step 2")
    assert [steps for _, _, steps, _ in results] == [3, 2]
    assert results[0][0][0] == ""


def _corrupt_at_attach() -> list[str]:
    """Rank 1 alone gets a corrupt header when the ranks meet."""
    model = DDP(make_model(), bucket_cap_mb=CAP)
    texts = []
    if dist.get_rank() == 1:
        with flipping(Transport, 0, HEADER_BYTES):
            try:
                sw.attach(model, "TopK(0.05)", timeout=TIMEOUT)
            except sw.SparsewireError as error:
                texts.append(str(error))
    else:
        wire = sw.attach(model, "TopK(0.05)", timeout=TIMEOUT)
        texts.append(_wait_for_error(wire))
        wire.detach()
    dist.barrier()
    return texts


def _wait_for_error(wire: sw.SparseHookState) -> str:
    end = time.monotonic() + patience(15)
    while wire.error is None and time.monotonic() < end:
        time.sleep(0.1)
    return str(wire.error)


def test_a_corrupt_header_at_attach_breaks_the_group(two: Cluster) -> None:
    (other,), (own,) = two.run(_corrupt_at_attach)
    assert "what arrived from rank 0 is no header" in own
    assert "reported by rank 1: what arrived from rank 0 is no header" in other


def _corrupt_updates() -> tuple[str, str, int]:
    """Rank 1 alone gets a corrupt status of a round of updates."""
    net = make_model()
    optimizer = sgd(net)
    wire = sw.attach(net, "TopK(0.05)", optimizer=optimizer, communicate="updates", timeout=TIMEOUT)
    texts = []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(net, dist.get_rank(), step).backward()
        try:
            if step == 1 and dist.get_rank() == 1:
                with flipping(wire.group._transport, 0, STATUS_BYTES):
                    optimizer.step()
            else:
                optimizer.step()
        except sw.SparsewireError as error:
            texts.append(f"{type(error).__name__}: {error}")
    steps = wire.steps
    wire.detach()
    dist.barrier()
    return texts[0], texts[-1], steps


def test_a_corrupt_status_of_updates_breaks_the_group(two: Cluster) -> None:
    (other, _, _), (own, last, steps) = two.run(_corrupt_updates)
    assert own.startswith("ExchangeError: the status of rank 0 at step 1")
    assert last.startswith("ExchangeError")
    assert steps == 1
    assert "reported by rank 1: the status of rank 0 at step 1" in other


def _corrupt_by_hand() -> list[str]:
    """Rank 1 alone gets a corrupt header in a loop without an adapter."""
    group = sw.groups.DistributedGroup(timeout=2.0)
    gradients = {"weight": torch.randn(40, 50)}
    state = sw.functional.init("TopK(0.05)", gradients)
    texts = []
    for _ in range(3):
        try:
            if not texts and dist.get_rank() == 1:
                with flipping(group._transport, 0, HEADER_BYTES):
                    sw.functional.exchange(gradients, state, group)
            else:
                sw.functional.exchange(gradients, state, group)
        except sw.errors.ExchangeError as error:
            texts.append(str(error))
    group.close()
    again = sw.groups.DistributedGroup(timeout=TIMEOUT)
    sw.functional.exchange(gradients, state, again)
    again.close()
    return texts


def test_an_abandoned_group_takes_no_request_and_is_not_used_again(two: Cluster) -> None:
    for texts in two.run(_corrupt_by_hand):
        assert len(texts) == 3
        assert all("the group is broken" in text for text in texts)
    assert "no header" in texts[0]
