"""`DistributedOptimizer`: any optimizer on top, γ inside the memory; alone and as threads."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparsewire as sw

from ..laws import problem
from ..laws.meeting import Seat, together

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def make_net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 3))


def pull(net: nn.Module, step: int) -> Tensor:
    """A loss whose gradient differs from step to step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 20, generator=generator)
    return net(inputs).square().mean()


def numbers(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, steps: range, scheduler: Any = None
) -> Tensor:
    for step in steps:
        optimizer.zero_grad()
        pull(net, step).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return numbers(net)


def wrapped(scheme: str, make: Make = OPTIMIZERS["sgd"]) -> tuple[nn.Module, Any]:
    net = make_net()
    return net, sw.DistributedOptimizer(net, make(list(net.parameters())), scheme)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dense_alone_is_the_optimizer_itself(name: str) -> None:
    net, optimizer = wrapped("Dense()", OPTIMIZERS[name])
    plain = make_net()
    expected = train(plain, OPTIMIZERS[name](list(plain.parameters())), range(10))
    assert torch.allclose(train(net, optimizer, range(10)), expected, atol=1e-6)
    assert optimizer.steps == 10


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sparse_training_lowers_the_loss(name: str) -> None:
    net, optimizer = wrapped("Scheme(TopK(0.05), dense_below=64)", OPTIMIZERS[name])
    before = float(pull(net, 0).detach())
    train(net, optimizer, range(40))
    assert float(pull(net, 0).detach()) < 0.8 * before


def test_gradient_is_the_mean_of_what_was_sent() -> None:
    net, optimizer = wrapped("Scheme(TopK(0.05), dense_below=64)")
    train(net, optimizer, range(1))
    weight = net[0].weight  # type: ignore[index]
    assert int(weight.grad.count_nonzero()) == 60
    assert net[0].bias.grad.all()  # type: ignore[index]  # is sent densely


@pytest.mark.parametrize("rates", [[0.1] * 8, [0.1] * 4 + [0.01] * 4], ids=["constant", "drop"])
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_ranks_stay_together(name: str, rates: list[float]) -> None:
    paths = problem.walk_optimizers(
        sw.Scheme(sw.TopK(0.1), dense_below=0, dense_1d=False),
        3,
        rates,
        lambda p, rate: OPTIMIZERS[name](p),
    )
    assert all(np.array_equal(path, paths[0]) for path in paths)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_ranks_stay_together_when_the_rate_starts_at_zero(name: str) -> None:
    """As it does under a linear warm-up: momentum must not take in what was not exchanged."""
    paths = problem.walk_optimizers(
        sw.Scheme(sw.TopK(0.1), dense_below=0, dense_1d=False),
        2,
        [0.0, 0.1, 0.1],
        lambda p, _: OPTIMIZERS[name](p),
    )
    assert np.array_equal(*paths)


def test_rate_of_zero_neither_deposits_nor_sends() -> None:
    net, optimizer = wrapped("Scheme(TopK(0.05), dense_below=64)")
    train(net, optimizer, range(2))
    kept, weights = copy.deepcopy(optimizer.state_dict()), numbers(net)
    optimizer.param_groups[0]["lr"] = 0.0
    train(net, optimizer, range(2, 4))
    assert torch.equal(numbers(net), weights)
    assert optimizer.steps == 2
    for name, memory in optimizer.state_dict()["memory"].items():
        assert torch.equal(memory["residual"], kept["memory"][name]["residual"])


def test_groups_may_have_rates_of_their_own() -> None:
    """γ is inside: what is held back carries the rate of its own group."""
    net = make_net()
    slow, fast = list(net[0].parameters()), list(net[2].parameters())  # type: ignore[index]
    groups = [{"params": slow, "lr": 0.01}, {"params": fast, "lr": 1.0}]
    optimizer = sw.DistributedOptimizer(
        net, torch.optim.SGD(groups, lr=0.1), "Scheme(TopK(0.05), dense_below=0, dense_1d=False)"
    )
    pull(net, 0).backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters()}  # type: ignore[union-attr]
    optimizer.step()
    for name, parameter in net.named_parameters():
        rate = 0.01 if name.startswith("0") else 1.0
        assert parameter.grad is not None
        held = optimizer.state_dict()["memory"][name]["residual"]
        total = held + rate * parameter.grad
        assert torch.allclose(total, rate * gradients[name], atol=1e-7)


def test_schedulers_and_closures_work() -> None:
    net, optimizer = wrapped("Scheme(TopK(0.05), dense_below=64)")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    train(net, optimizer, range(4), scheduler)
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = pull(net, 0)
        loss.backward()
        return loss

    before = numbers(net)
    loss = optimizer.step(closure)
    assert loss.requires_grad
    assert not torch.equal(numbers(net), before)


def test_step_hooks_are_those_of_the_optimizer() -> None:
    net, optimizer = wrapped("TopK(0.05)")
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(net, optimizer, range(1))
    assert calls == ["before", "after"]


def test_it_is_an_optimizer() -> None:
    net, optimizer = wrapped("TopK(0.05)", OPTIMIZERS["momentum"])
    assert isinstance(optimizer, torch.optim.Optimizer)
    train(net, optimizer, range(1))
    assert optimizer.state is optimizer.optimizer.state
    assert len(optimizer.state) == 4
    optimizer.zero_grad()
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_numbers_change_nothing(bad: float) -> None:
    net, optimizer = wrapped("Scheme(TopK(0.05), dense_below=64)", OPTIMIZERS["momentum"])
    train(net, optimizer, range(3))
    weights, kept = numbers(net), copy.deepcopy(optimizer.state_dict())
    pull(net, 3).backward()
    net[2].weight.grad[1, 5] = bad  # type: ignore[index]
    with pytest.raises(
        sw.errors.NonFiniteError, match=r"at step 3: rank 0 in 2\.weight\. No rank took"
    ):
        optimizer.step()
    assert torch.equal(numbers(net), weights)
    now = optimizer.state_dict()
    assert now["step"] == kept["step"] == 3
    for name, memory in kept["memory"].items():
        assert torch.equal(now["memory"][name]["residual"], memory["residual"])
    twin, undisturbed = wrapped("Scheme(TopK(0.05), dense_below=64)", OPTIMIZERS["momentum"])
    assert torch.equal(train(net, optimizer, range(3, 5)), train(twin, undisturbed, range(5)))


def test_bad_numbers_on_one_rank_are_named_on_all() -> None:
    def work(seat: Seat) -> str:
        net, optimizer = wrapped("TopK(0.05)")
        optimizer._join(seat)
        pull(net, 0).backward()
        if seat.rank == 1:
            net[0].bias.grad[0] = math.nan  # type: ignore[index]
        with pytest.raises(sw.errors.NonFiniteError) as error:
            optimizer.step()
        return str(error.value)

    texts = together(3, work)
    assert len(set(texts)) == 1
    assert "rank 1 in 0.bias" in texts[0]


def test_parameters_without_a_gradient_count_as_zero() -> None:
    net, optimizer = wrapped("Scheme(TopK(0.05), dense_below=64)")
    pull(net, 0).backward()
    net[2].bias.grad = None  # type: ignore[index]
    optimizer.step()
    assert not net[2].bias.grad.any()  # type: ignore[index]


def test_frozen_parameters_are_left_out() -> None:
    net = make_net()
    net[0].weight.requires_grad_(False)  # type: ignore[index]
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = sw.DistributedOptimizer(net, torch.optim.SGD(trained, lr=0.1), "TopK(0.05)")
    train(net, optimizer, range(2))
    assert "0.weight" not in optimizer.state_dict()["memory"]
    assert torch.equal(net[0].weight, make_net()[0].weight)  # type: ignore[index]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_is_as_never_stopped(name: str) -> None:
    scheme = "Scheme(BlockRandomK(0.05), dense_below=64)"
    net, optimizer = wrapped(scheme, OPTIMIZERS[name])
    train(net, optimizer, range(4))
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    straight = train(net, optimizer, range(4, 8))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, resumed = wrapped(scheme, OPTIMIZERS[name])
    again.load_state_dict(saved["net"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.param_groups is resumed.optimizer.param_groups
    assert resumed.steps == 4
    assert torch.equal(train(again, resumed, range(4, 8)), straight)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"scheme": "Scheme(TopK(0.5))", "identity": ""},
            r"is of Scheme\(TopK\(0\.5\)\), .* Scheme\(TopK\(0\.05",
        ),
        ({"rank": 1, "world_size": 2}, "rank 1 of 2, .* rank 0 of 1"),
        ({"format": 99}, "format 99, and this version of sparsewire reads 2"),
        ({"memory": {}}, r"lacks 0\.bias, 0\.weight"),
    ],
)
def test_state_that_does_not_fit_is_refused(change: dict[str, Any], reason: str) -> None:
    net, optimizer = wrapped("TopK(0.05)")
    train(net, optimizer, range(2))
    with pytest.raises(sw.errors.StateError, match=reason):
        optimizer.load_state_dict({**optimizer.state_dict(), **change})
    assert optimizer.steps == 2


def test_plain_optimizer_state_is_refused() -> None:
    _, optimizer = wrapped("TopK(0.05)")
    with pytest.raises(sw.errors.StateError, match=r"pass what state_dict\(\) returned"):
        optimizer.load_state_dict(optimizer.optimizer.state_dict())


def test_report() -> None:
    net, optimizer = wrapped("Scheme(TopK(0.05), dense_below=64)")
    train(net, optimizer, range(3))
    report = optimizer.report(layers=True)
    assert (report.steps, report.world_size, report.bytes_sent) == (3, 1, 0)
    assert report.memory_norm > 0
    assert {name for name, _, _ in report.layers} == {n for n, _ in net.named_parameters()}
    assert optimizer.report().layers == ()


def test_scheme_may_be_given_in_all_ways() -> None:
    net = make_net()
    for scheme in (sw.TopK(0.05), "TopK(0.05)", sw.Scheme(sw.TopK(0.05))):
        optimizer = sw.DistributedOptimizer(net, torch.optim.SGD(net.parameters(), lr=0.1), scheme)
        assert optimizer.scheme == sw.Scheme(sw.TopK(0.05))


def test_momentum_twice_is_refused() -> None:
    net = make_net()
    scheme = "Scheme(TopK(0.05), memory=MomentumCorrection())"
    with pytest.raises(sw.errors.AttachError, match=r"has momentum 0\.9 of its own"):
        sw.DistributedOptimizer(net, OPTIMIZERS["momentum"](list(net.parameters())), scheme)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float64, 1.2345678901234567),
        (torch.bfloat16, 1.2345),
        (torch.float16, 2e-5),
    ],
    ids=str,
)
def test_narrow_gradients_survive_a_small_rate(dtype: torch.dtype, size: float) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    scheme = "Scheme(Dense(), collective=AllGather())"
    optimizer = sw.DistributedOptimizer(
        module, torch.optim.SGD(module.parameters(), lr=0.003), scheme
    )
    gradient = size * torch.linspace(0.5, 1, 16, dtype=torch.float64).view(4, 4).to(dtype)
    module.weight.grad = gradient.clone()
    optimizer.step()
    rounding = 1e-7 if dtype == torch.float64 else 0  # values travel in float32
    assert torch.allclose(module.weight.grad, gradient, rtol=rounding, atol=0)


def test_gradients_of_any_layout() -> None:
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plain = copy.deepcopy(net)
    optimizer = sw.DistributedOptimizer(net, torch.optim.SGD(net.parameters(), lr=0.5), "Dense()")
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    inputs = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for module, stepper in ((net, optimizer), (plain, reference)):
        module(inputs).square().mean().backward()
        stepper.step()
    assert torch.allclose(numbers(net), numbers(plain), atol=1e-7)


def test_grad_scaler_that_divides_first() -> None:
    """All ranks step or none does, since bad numbers are for the exchange to find."""
    net, optimizer = wrapped("Scheme(TopK(0.05), dense_below=64)")
    twin, plain = wrapped("Scheme(TopK(0.05), dense_below=64)")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(pull(net, step)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert torch.allclose(numbers(net), train(twin, plain, range(3)), atol=1e-6)
    scaler.scale(pull(net, 3)).backward()
    net[0].bias.grad[0] = math.nan  # type: ignore[index]
    scaler.unscale_(optimizer)
    with pytest.raises(sw.errors.NonFiniteError, match=r"rank 0 in 0\.bias"):
        scaler.step(optimizer)


def test_grad_scaler_that_decides_alone_is_refused() -> None:
    net, optimizer = wrapped("TopK(0.05)")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(pull(net, 0)).backward()
    with pytest.raises(sw.errors.AttachError, match=r"use DDP and attach\(…, scaler=scaler\)"):
        scaler.step(optimizer)
