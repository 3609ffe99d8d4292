"""Exchange of updates on real processes: ranks stay together, resume, and fail together."""

from __future__ import annotations

import copy
import hashlib
import io
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw

from ..cluster import Cluster
from ..patience import patience, telling, wait_for
from .test_corruption import Noise
from .training import CAP, loss_of, make_model, numbers, sgd

Fresh = Callable[..., Cluster]
Parts = tuple[nn.Module, torch.optim.Optimizer, sw.SparseUpdates]

SCHEME = "TopK(0.05)"


def _net(seed: int) -> nn.Module:
    """A model with buffers."""
    net = make_model(seed)
    net.add_module("norm", nn.BatchNorm1d(10))
    return net


def _start(scheme: str = SCHEME, with_ddp: bool = False, **options: Any) -> Parts:
    """With AdamW; every rank comes with other weights, which are made equal."""
    net = _net(dist.get_rank())
    model = DDP(net, bucket_cap_mb=CAP) if with_ddp else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wire = sw.attach(model, scheme, optimizer=optimizer, communicate="updates", **options)
    return model, optimizer, wire


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Two batches are accumulated, the first one without DDP's exchange."""
    optimizer.zero_grad()
    with model.no_sync() if isinstance(model, DDP) else nullcontext():
        loss_of(model, dist.get_rank(), 2 * step).backward()
    loss_of(model, dist.get_rank(), 2 * step + 1).backward()
    optimizer.step()


def _digest(*tensors: Tensor) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().numpy().tobytes())
    return whole.hexdigest()


def _shared(model: nn.Module, wire: sw.SparseUpdates) -> str:
    """The weights that are equal on all ranks."""
    with wire.shared_weights():
        return _digest(*model.parameters())


def _alike(results: list[Any]) -> bool:
    return all(result == results[0] for result in results)


# -- ranks stay together -------------------------------------------------------------------------


def _train(scheme: str, options: dict[str, Any]) -> dict[str, Any]:
    """The same training with DDP and without."""
    found: dict[str, Any] = {}
    for with_ddp in (False, True):
        model, optimizer, wire = _start(scheme, with_ddp, **options)
        before = float(loss_of(model, 0, 0).detach())
        shared = []
        for step in range(8):
            _step(model, optimizer, step)
            shared.append(_shared(model, wire))
            if not with_ddp and wire.local_step == 0:  # a round has ended
                found["buffers"] = _digest(*model.buffers())
        key = "ddp" if with_ddp else "plain"
        found[f"gradient {key}"] = _digest(*(p.grad for p in model.parameters()))
        found[f"live {key}"] = _digest(*model.parameters())
        found[f"shared {key}"] = shared
        wire.detach()
        found[f"detached {key}"] = _digest(*model.parameters())
        assert float(loss_of(model, 0, 0).detach()) < before
        assert wire.report().steps == 8 // wire.every
    return found


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        (SCHEME, {}),
        (SCHEME, {"every": 3, "step_ahead": 0.5}),
        ("Scheme(TopK(0.05), collective=Sharded())", {"every": 2}),
        (SCHEME, {"every": 2, "delay": 1}),
    ],
    ids=str,
)
def test_ranks_share_weights_to_the_bit(two: Cluster, scheme: str, options: dict[str, Any]) -> None:
    results = two.run(_train, scheme, options)
    for key in ("shared plain", "detached plain", "shared ddp"):
        assert _alike([result[key] for result in results]), key
    every, delay = options.get("every", 1), options.get("delay", 0)
    for result in results:
        assert result["shared plain"] == result["shared ddp"]
        moved = [after != before for before, after in pairwise(result["shared plain"])]
        assert moved == [step % every == 0 and step >= every * (1 + delay) for step in range(2, 9)]
        if delay:
            assert result["detached plain"] != result["shared plain"][-1]
        else:
            assert result["detached plain"] == result["shared plain"][-1]
    # every rank trains on its own gradient, and its live weights are ahead by its own residual
    for key in ("gradient plain", "gradient ddp", "live plain", "live ddp"):
        assert not _alike([result[key] for result in results]), key
    if not options.get("delay"):
        assert _alike([result["buffers"] for result in results])


# -- stop and resume -----------------------------------------------------------------------------


def _through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _resume(stop: int, options: dict[str, Any]) -> list[str]:
    """The whole training; then stopped, saved, and gone on with, the model loaded first or last."""
    model, optimizer, wire = _start(**options)
    for step in range(9):
        _step(model, optimizer, step)
        if step + 1 == stop:
            saved = _through_a_file(
                {"model": model.state_dict(), "opt": optimizer.state_dict(), "w": wire.state_dict()}
            )
    ends = [_shared(model, wire) + _digest(*model.parameters())]
    wire.detach()
    for wire_first in (True, False):
        model, optimizer, wire = _start(**options)
        if wire_first:
            wire.load_state_dict(saved["w"])
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["opt"]))
        if not wire_first:
            wire.load_state_dict(saved["w"])
        for step in range(stop, 9):
            _step(model, optimizer, step)
        ends.append(_shared(model, wire) + _digest(*model.parameters()))
        wire.detach()
    return ends


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("stop", [4, 5])
def test_resumed_equals_never_stopped(two: Cluster, stop: int, delay: int) -> None:
    options = {"every": 2, "delay": delay, "with_ddp": bool(delay)}
    for ends in two.run(_resume, stop, options):
        assert _alike(ends)


def test_ranks_that_share_a_machine(four: Cluster) -> None:
    """Two machines of two ranks: together, resumed, and each with gradients of its own."""
    results = four.run(_resume, 3, {"every": 2, "intra_node": 2})
    for ends in results:
        assert _alike(ends)
    assert _alike([ends[0][:64] for ends in results])
    results = four.run(_nan, "raise", {"intra_node": 2})
    for message, unchanged, _ in results:
        assert "machine 1 in 2.weight" in message
        assert unchanged
    assert _alike([end for _, _, end in results])


# -- what is not finite --------------------------------------------------------------------------


def _nan(mode: str, options: dict[str, Any]) -> tuple[str, bool, str]:
    """The last rank's gradient is bad in one step.

    Returns the error, whether nothing that it may not change changed, and the weights at the end.
    """
    model, optimizer, wire = _start(on_nonfinite=mode, **options)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    message, unchanged = "", False
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        if step == 2 and is_last:
            model.get_parameter("2.weight").grad[3, 5] = float("nan")  # type: ignore[index]
        before = _shared(model, wire), wire.state_dict()["memory"]
        own = copy.deepcopy(optimizer.state_dict())
        try:
            optimizer.step()
        except sw.errors.NonFiniteError as error:
            message = str(error)
        if step == 2:
            after = _shared(model, wire), wire.state_dict()["memory"]
            kept = all(  # of which only the first rank of a machine has any
                torch.equal(tensor, after[1][name][field])
                for name, fields in before[1].items()
                for field, tensor in fields.items()
            )
            was_left_out = str(own["state"]) == str(optimizer.state_dict()["state"])
            assert was_left_out == is_last
            unchanged = before[0] == after[0] and kept
    assert wire.steps == (3 if mode == "raise" else 4)
    end = _shared(model, wire)
    wire.detach()
    return message, unchanged, end


def test_one_ranks_nan_is_raised_on_all(two: Cluster) -> None:
    results = two.run(_nan, "raise", {})
    for message, unchanged, _ in results:
        assert "at step 2: rank 1 in 2.weight. No rank took the step" in message
        assert unchanged
    assert _alike([(message, end) for message, _, end in results])


def test_a_skip_goes_on_without_that_ranks_step(two: Cluster) -> None:
    results = two.run(_nan, "skip", {})
    for message, unchanged, _ in results:
        assert message == ""
        assert not unchanged
    assert _alike([end for *_, end in results])


def _overflow(with_ddp: bool) -> tuple[str, list[float], int]:
    """Rank 1's GradScaler leaves two steps out."""
    net = _net(0)
    model = DDP(net, bucket_cap_mb=CAP) if with_ddp else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    wire = sw.attach(
        model, SCHEME, optimizer=optimizer, communicate="updates", scaler=scaler, every=2
    )
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, dist.get_rank(), step)).backward()
        if step in (2, 5) and dist.get_rank() == 1:
            net.get_parameter("0.bias").grad[0] = float("inf")  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    shared, steps = _shared(model, wire), wire.steps
    wire.detach()
    return shared, scales, steps


@pytest.mark.parametrize("with_ddp", [False, True])
def test_one_ranks_overflow_holds_nobody_up(two: Cluster, with_ddp: bool) -> None:
    (mine, scales, steps), (other, lower, _) = two.run(_overflow, with_ddp)
    assert (mine, steps) == (other, 3)
    assert scales == [64.0] * 6
    assert lower == [64.0] * 2 + [32.0] * 3 + [16.0]


# -- what goes wrong between ranks ---------------------------------------------------------------


def _corrupt(delay: int) -> tuple[list[tuple[int, str]], str, float]:
    """Rank 1 receives a damaged message in one round.

    Returns at which steps which errors were raised, the shared weights, and by how much what was
    computed differs from what was applied and what is still kept, on average over ranks.
    """
    model = make_model()
    optimizer = sgd(model)
    wire = sw.attach(
        model, SCHEME, optimizer=optimizer, communicate="updates", step_ahead=0.0, delay=delay
    )
    noise = Noise(wire, 0, "", arrival=2) if dist.get_rank() == 1 else None
    start, computed = numbers(model), torch.zeros(0)
    errors, unchanged = [], False
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        update = torch.cat([0.1 * p.grad.reshape(-1) for p in model.parameters()])  # type: ignore[union-attr]
        before = _shared(model, wire)
        try:
            optimizer.step()
        except sw.errors.CorruptMessageError as error:
            errors.append((step, str(error)))
            unchanged = _shared(model, wire) == before
            if delay:
                update.zero_()  # the step that found it is not taken
        computed = update if step == 0 else computed + update
    assert noise is None or noise.flips == 1
    assert unchanged
    assert isinstance(wire.error, sw.errors.CorruptMessageError)
    wire.detach()
    memory = wire.state_dict()["memory"]
    kept = torch.cat([memory[n]["residual"].reshape(-1) for n, _ in model.named_parameters()])
    difference = computed - kept
    dist.all_reduce(difference)
    off = difference / dist.get_world_size() - (start - numbers(model))
    return errors, _digest(*model.parameters()), float(off.abs().max())


@pytest.mark.parametrize("delay", [0, 1])
def test_a_corrupt_message_defers_the_round(two: Cluster, delay: int) -> None:
    results = two.run(_corrupt, delay)
    for errors, _, off in results:
        ((step, message),) = errors
        assert step == 2 + delay
        assert "the message of rank 0 that rank 1 received at step 2" in message
        assert off < 1e-6
    assert _alike([(errors, shared) for errors, shared, _ in results])


def _disagree() -> dict[str, str]:
    found = {}
    odd = dist.get_rank() == 1
    choices: dict[str, dict[str, Any]] = {
        "scheme": {"scheme": "TopK(0.06)"},
        "every": {"every": 2},
        "delay": {"delay": 1},
        "ahead": {"step_ahead": 0.5},
        "mode": {"on_nonfinite": "skip"},
        "outer": {"outer": True},
        "kind": {"communicate": "gradients"},
    }
    for key, choice in choices.items():
        model = DDP(make_model(), bucket_cap_mb=CAP)
        options = {"scheme": SCHEME, "communicate": "updates", **(choice if odd else {})}
        if "outer" in options:
            options["outer"] = sgd(model)
        try:
            sw.attach(model, optimizer=sgd(model), **options)
        except sw.errors.DisagreementError as error:
            found[key] = str(error)
        else:
            found[key] = "attached"
    return found


def test_other_choices_are_found_out_at_attach(two: Cluster) -> None:
    for rank, found in enumerate(two.run(_disagree)):
        for key, message in found.items():
            assert "1 of 2 disagree" in message or "disagree" in message, key
            assert f"this is rank {rank}" in message, key


def _train_until_it_breaks(delay: int, timeout: float, ready: Path) -> tuple[str, float, str, bool]:
    model, optimizer, wire = _start(delay=delay, timeout=timeout)
    for step in range(100_000):
        if step == 3:
            (ready / str(dist.get_rank())).touch()
        before, start = _shared(model, wire), time.monotonic()
        try:
            _step(model, optimizer, step)
        except sw.errors.ExchangeError as error:
            took = time.monotonic() - start
            kept = before == _shared(model, wire)
            with pytest.raises(sw.errors.ExchangeError) as again:
                _step(model, optimizer, step)
            return str(error), took, str(again.value), kept
    return "nothing broke", 0.0, "", False


@pytest.mark.parametrize("delay", [0, 1])
def test_a_killed_rank_is_named_by_all_others(fresh: Fresh, delay: int, tmp_path: Path) -> None:
    cluster, deadline = fresh(3), patience(30)
    cluster.start(_train_until_it_breaks, delay, deadline, tmp_path)
    wait_for(lambda: len(list(tmp_path.iterdir())) == cluster.size)
    cluster.kill(1)
    for rank in (0, 2):
        fine, value = cluster.collect_one(rank)
        assert fine, value
        message, took, again, kept = value
        assert "rank 1 of 3 did not answer" in message
        assert f"on rank {rank} of 3" in message
        assert "the exchange of step" in message
        assert took < deadline
        assert again == message
        assert kept


def _uneven(deadline: float, over: Path) -> tuple[int, str]:
    """Rank 0 has one batch more."""
    model, optimizer, wire = _start(timeout=deadline, with_ddp=False)
    for step in range(3):
        _step(model, optimizer, step)
    message = ""
    if dist.get_rank() == 0:
        with telling(over), pytest.raises(sw.errors.ExchangeError) as error:
            _step(model, optimizer, 3)
        message = str(error.value)
    else:
        wait_for(over.exists)
    steps = wire.steps
    wire.detach()
    return steps, message


def test_ranks_with_unequal_numbers_of_steps(fresh: Fresh, tmp_path: Path) -> None:
    deadline = patience(3)
    (steps, message), (other, _) = fresh(2).run(_uneven, deadline, tmp_path / "over")
    assert steps == other == 3
    assert "the exchange of step 3 failed on rank 0 of 2" in message
    assert f"slow rather than lost, give it more than timeout={deadline:g}" in message
