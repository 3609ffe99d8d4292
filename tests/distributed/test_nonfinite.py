"""NaN and infinity on one rank: all ranks agree on the step, and no memory takes any of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw

from ..cluster import Cluster
from .training import CAP, batch, loss_of, make_model, numbers, sgd

SCHEMES = ["TopK(0.05)", "RandomK(0.05)", "Scheme(TopK(0.05), scope='global')", "Dense()"]


def _poison(model: nn.Module, value: float) -> Any:
    """Let rank 1's gradient of a middle layer hold `value` in one place."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        if dist.get_rank() == 1:
            gradient[3, 5] = value
        return gradient

    return model.get_parameter("2.weight").register_hook(hook)


def _same_memory(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        torch.equal(kept["residual"], other["memory"][name]["residual"])
        for name, kept in one["memory"].items()
    )


def _raises(scheme: str, value: float) -> tuple[str, str, bool, bool]:
    rank = dist.get_rank()
    net = make_model()
    model = DDP(net, bucket_cap_mb=CAP)
    optimizer = sgd(model)
    wire = sw.attach(model, scheme)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    kept = copy.deepcopy(wire.state_dict())
    poison = _poison(net, value)
    message = ""
    try:
        loss_of(model, rank, 1).backward()
    except RuntimeError as error:
        message = str(error)
    poison.remove()
    unchanged = _same_memory(kept, wire.state_dict()) and wire.steps == 1
    optimizer.zero_grad()
    loss_of(model, rank, 1).backward()  # DDP and the exchange go on
    optimizer.step()
    fine = wire.steps == 2 and bool(numbers(model).isfinite().all())
    wire.detach()
    return message, type(wire.error).__name__, unchanged, fine


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_ranks_raise_and_nothing_changes(two: Cluster, scheme: str, value: float) -> None:
    for message, kind, unchanged, fine in two.run(_raises, scheme, value):
        assert "rank 1 in 2.weight" in message
        assert "step 1" in message
        assert kind == "NonFiniteError"
        assert unchanged
        assert fine


def _skips(scheme: str, with_optimizer: bool) -> tuple[bool, bool, int, torch.Tensor]:
    rank = dist.get_rank()
    net = make_model()
    model = DDP(net, bucket_cap_mb=CAP)
    optimizer = sgd(model, momentum=0.9, weight_decay=0.1)
    wire = sw.attach(
        model, scheme, on_nonfinite="skip", optimizer=optimizer if with_optimizer else None
    )
    still, unchanged = True, True
    for step in range(6):
        optimizer.zero_grad()
        poison = _poison(net, float("nan")) if step in (2, 3) else None
        before = numbers(model).clone()
        kept = copy.deepcopy(wire.state_dict())
        loss_of(model, rank, step).backward()
        optimizer.step()
        if poison is not None:
            poison.remove()
            still &= torch.equal(before, numbers(model))
            unchanged &= _same_memory(kept, wire.state_dict())
    skipped = wire.report().skipped
    wire.detach()
    return still, unchanged, skipped, numbers(model)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_skipped_steps_move_nothing(two: Cluster, scheme: str) -> None:
    results = two.run(_skips, scheme, True)
    for still, unchanged, skipped, parameters in results:
        assert still
        assert unchanged
        assert skipped == 2
        assert parameters.isfinite().all()
        assert torch.equal(parameters, results[0][3])


def _steps_where_the_own_loss_is_finite() -> tuple[list[float], torch.Tensor]:
    """A loop that leaves a step out only on the rank that sees NaN in its own loss."""
    rank = dist.get_rank()
    model = DDP(make_model(), bucket_cap_mb=CAP)
    optimizer = sgd(model, momentum=0.9)
    wire = sw.attach(model, "TopK(0.05)", on_nonfinite="skip", optimizer=optimizer)
    moved = []
    for step in range(5):
        optimizer.zero_grad()
        before = numbers(model).clone()
        loss = loss_of(model, rank, step)
        if step == 2 and rank == 1:
            loss = loss * float("nan")
        loss.backward()
        if loss.isfinite():
            optimizer.step()
        moved.append(float((numbers(model) - before).abs().max()))
    wire.detach()
    return moved, numbers(model)


def test_a_skip_is_not_spent_on_a_later_step(two: Cluster) -> None:
    results = two.run(_steps_where_the_own_loss_is_finite)
    for moved, parameters in results:
        assert [bool(step) for step in moved] == [True, True, False, True, True]
        assert torch.equal(parameters, results[0][1])


def test_without_the_optimizer_a_skip_gives_zero_gradients(two: Cluster) -> None:
    results = two.run(_skips, "TopK(0.05)", False)
    for still, unchanged, skipped, parameters in results:
        assert not still  # momentum and weight decay still act
        assert unchanged
        assert skipped == 2
        assert parameters.isfinite().all()


def _amp(scheme: str | None) -> tuple[list[float], float, float]:
    """A GradScaler loop whose scale starts far too high, and overflows at some later steps."""
    rank = dist.get_rank()
    net = make_model()
    model = DDP(net, bucket_cap_mb=CAP)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    wire = sw.attach(model, scheme, scaler=scaler) if scheme is not None else None
    scales = []
    for step in range(30):
        optimizer.zero_grad()
        poison = _poison(net, float("inf")) if step in (0, 1, 9, 17) else None
        scaler.scale(loss_of(model, rank, 0)).backward()
        if poison is not None:
            poison.remove()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    ratio = 0.0
    if wire is not None:
        report = wire.report()
        assert report.skipped == 4
        ratio = report.memory_norm / report.gradient_norm
        wire.detach()
    return scales, float(loss_of(net, rank, 0).detach()), ratio


@pytest.mark.parametrize("scheme", ["TopK(0.1)", "RandomK(0.1)"])
def test_a_grad_scaler_loop_trains_on_as_dense_would(two: Cluster, scheme: str) -> None:
    dense = two.run(_amp, None)
    sparse = two.run(_amp, scheme)
    for (scales, loss, _), (their_scales, their_loss, ratio) in zip(dense, sparse, strict=True):
        assert their_scales == scales
        assert their_loss < 2.0  # from 2.3; dense overfits the one batch further
        assert loss < 2.0
        assert ratio < 100


def _amp_units(pass_scaler: bool) -> torch.Tensor:
    """One step at scale 1, one at scale 1024: what is held back must not weigh less then."""
    model = DDP(make_model(), bucket_cap_mb=CAP)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    wire = sw.attach(model, "TopK(0.05)", scaler=scaler if pass_scaler else None)
    scaler.scale(loss_of(model, dist.get_rank(), 0)).backward()
    model.zero_grad()
    scaler.update(1024.0)
    scaler.scale(loss_of(model, dist.get_rank(), 1)).backward()
    kept = wire.state_dict()["memory"]["2.weight"]["residual"]
    wire.detach()
    return kept / 1024.0


def test_the_memory_follows_the_scale(two: Cluster) -> None:
    followed, ignored = two.run(_amp_units, True)[0], two.run(_amp_units, False)[0]
    model = make_model()
    state = sw.functional.init("TopK(0.05)", dict(model.named_parameters()))
    states = [state, state]
    for step in range(2):
        gradients = []
        for rank in range(2):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        _, states = sw.functional.simulate(gradients, states)
    expected = states[0].memory["2.weight"]["residual"]
    torch.testing.assert_close(followed, expected, rtol=0, atol=1e-7)
    assert (ignored - expected).abs().max() > 1e-4


def _clipped() -> torch.Tensor:
    """Clipping after backward acts on the mean, as with plain DDP."""
    model = DDP(make_model(), bucket_cap_mb=CAP)
    wire = sw.attach(model, "TopK(0.05)")
    inputs, targets = batch(dist.get_rank(), 0)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    wire.detach()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm()


def test_clipping_works_on_the_mean(two: Cluster) -> None:
    norms = two.run(_clipped)
    assert norms[0] == norms[1]
    assert float(norms[0]) == pytest.approx(1e-3, rel=1e-2)


def _disabled_scaler() -> str:
    net = make_model()
    model = DDP(net, bucket_cap_mb=CAP)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    wire = sw.attach(model, "TopK(0.05)", scaler=scaler)
    poison = _poison(net, float("nan"))
    message = ""
    try:
        scaler.scale(loss_of(model, dist.get_rank(), 0)).backward()
    except RuntimeError as error:
        message = str(error)
    poison.remove()
    wire.detach()
    return message


def test_a_disabled_scaler_lets_nothing_through(two: Cluster) -> None:
    for message in two.run(_disabled_scaler):
        assert "rank 1 in 2.weight" in message


def _all_nan_with_scaler() -> bool:
    net = make_model()
    model = DDP(net, bucket_cap_mb=CAP)
    wire = sw.attach(model, "TopK(0.05)", scaler=torch.amp.GradScaler("cpu"))
    poison = _poison(net, float("inf"))
    loss_of(model, dist.get_rank(), 0).backward()
    poison.remove()
    wire.detach()
    return all(bool(p.grad.isnan().all()) for p in model.parameters())


def test_an_overflow_reaches_every_parameter(two: Cluster) -> None:
    """So that optimizers over parts of the model skip the step too, on all ranks alike."""
    assert all(two.run(_all_nan_with_scaler))


def _updates_after_nan(delay: int) -> list[bool]:
    """One batch is bad on rank 1; returns which of the later local steps raised."""
    net = make_model()
    optimizer = sgd(net)
    wire = sw.attach(
        net,
        "TopK(0.1)",
        optimizer=optimizer,
        communicate="updates",
        every=2,
        delay=delay,
        step_ahead=0.5,
    )
    failed = []
    for step in range(16):
        optimizer.zero_grad()
        loss = loss_of(net, dist.get_rank(), step)
        (loss * float("nan") if step == 4 and dist.get_rank() == 1 else loss).backward()
        try:
            optimizer.step()
        except sw.errors.NonFiniteError:
            failed.append(True)
        else:
            failed.append(False)
    wire.detach()
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    return failed


@pytest.mark.parametrize("delay", [0, 1])
def test_one_bad_batch_fails_one_round_of_updates(two: Cluster, delay: int) -> None:
    for failed in two.run(_updates_after_nan, delay):
        assert [step for step, has in enumerate(failed) if has] == [5 + 2 * delay]
