"""DDP's own options and corner cases, each with the exchange attached."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw
from sparsewire.groups import transport

from ..cluster import Cluster
from .training import (
    CAP,
    batch,
    buckets_of,
    loss_of,
    make_model,
    numbers,
    sgd,
    train_ddp,
    train_simulated,
)

SCHEMES = ("TopK(0.05)", "Scheme(RandomK(0.05), scope='global')")


@pytest.mark.parametrize("scheme", ["Dense()", "TopK(1.0)", "Scheme(RandomK(1.0), scope=100)"])
def test_sending_everything_equals_plain_ddp(two: Cluster, four: Cluster, scheme: str) -> None:
    for cluster, tolerance in ((two, 0.0), (four, 1e-6)):
        plain = cluster.run(train_ddp, None)
        sparse = cluster.run(train_ddp, scheme)
        torch.testing.assert_close(sparse[0], plain[0], rtol=0, atol=tolerance)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 25},
        {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True},  # every tensor its own bucket
    ],
    ids=str,
)
def test_ddp_options(four: Cluster, scheme: str, options: dict[str, Any]) -> None:
    real = four.run(train_ddp, scheme, 8, options)
    assert torch.equal(real[0], real[3])
    assert torch.equal(real[0], train_simulated(scheme, 4, 8))


def _compiled(scheme: str, steps: int, inside: bool) -> torch.Tensor:
    """Train a model that is compiled before DDP wraps it, or after."""
    rank, net = dist.get_rank(), make_model()
    if inside:
        model: Any = DDP(torch.compile(net, backend="aot_eager"), bucket_cap_mb=1)
    else:
        model = torch.compile(DDP(net, bucket_cap_mb=1), backend="aot_eager")
    optimizer = sgd(model)
    wire = sw.attach(model, scheme)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    assert wire.steps == steps
    wire.detach()
    torch._dynamo.reset()
    return numbers(model)


@pytest.mark.parametrize("inside", [True, False])
def test_compiled_models(two: Cluster, inside: bool) -> None:
    for scheme in SCHEMES:
        real = two.run(_compiled, scheme, 6, inside)
        assert torch.equal(real[0], real[1])
        torch.testing.assert_close(real[0], train_simulated(scheme, 2, 6))


def _train_with_optimizer_momentum(scheme: str) -> torch.Tensor:
    return train_ddp(scheme, 8, momentum=0.9)


def test_optimizer_with_momentum(two: Cluster) -> None:
    real = two.run(_train_with_optimizer_momentum, SCHEMES[0])
    assert torch.equal(real[0], train_simulated(SCHEMES[0], 2, 8, momentum=0.9))


def _accumulate(scheme: str, steps: int) -> torch.Tensor:
    rank = dist.get_rank()
    model = DDP(make_model(), bucket_cap_mb=CAP)
    optimizer = sgd(model)
    wire = sw.attach(model, scheme)
    for step in range(steps):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, rank, 2 * step).backward()
        assert wire.steps == step
        loss_of(model, rank, 2 * step + 1).backward()
        optimizer.step()
    wire.detach()
    return numbers(model)


def test_no_sync_accumulation(two: Cluster) -> None:
    real = two.run(_accumulate, SCHEMES[0], 4)
    model = make_model()
    named, optimizer = dict(model.named_parameters()), sgd(model)
    states = [sw.functional.init(SCHEMES[0], named) for _ in range(2)]
    for step in range(4):
        gradients = []
        for rank in range(2):
            model.zero_grad()
            loss_of(model, rank, 2 * step).backward()
            loss_of(model, rank, 2 * step + 1).backward()
            gradients.append({n: copy.deepcopy(p.grad) for n, p in named.items()})
        mean, states = sw.functional.simulate(gradients, states)
        for name, parameter in named.items():
            parameter.grad = mean[name]
        optimizer.step()
    assert torch.equal(real[0], numbers(model))
    assert torch.equal(real[1], numbers(model))


def _frozen() -> tuple[list[str], bool]:
    model = make_model()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    before = model[0].weight.clone()
    ddp = DDP(model, bucket_cap_mb=CAP)
    wire = sw.attach(ddp, "TopK(0.05)")
    loss_of(ddp, dist.get_rank(), 0).backward()
    sgd(ddp).step()
    wire.detach()
    return sorted(wire.state_dict()["memory"]), torch.equal(before, model[0].weight)


def test_frozen_parameters_stay_out(two: Cluster) -> None:
    for names, unchanged in two.run(_frozen):
        assert "0.weight" not in names
        assert "2.weight" in names
        assert unchanged


class Mixed(nn.Module):
    """Parameters of three types."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f32 = nn.Linear(64, 64)
        self.bf16 = nn.Linear(64, 64).bfloat16()
        self.f64 = nn.Linear(64, 64).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.bf16(self.f32(inputs).bfloat16())
        return self.f64(hidden.double()).square().mean()


def _mixed(scheme: str) -> tuple[torch.Tensor, dict[str, torch.dtype]]:
    ddp = DDP(Mixed(), bucket_cap_mb=CAP)
    wire = sw.attach(ddp, scheme)
    optimizer = sgd(ddp)
    for step in range(5):
        optimizer.zero_grad()
        ddp(batch(dist.get_rank(), step)[0]).backward()
        optimizer.step()
    memory = {n: kept["residual"].dtype for n, kept in wire.state_dict()["memory"].items()}
    wire.detach()
    return torch.cat([p.detach().double().reshape(-1) for p in ddp.parameters()]), memory


@pytest.mark.parametrize("scheme", ["TopK(0.05)", "Scheme(TopK(0.05), scope='global')", "Dense()"])
def test_parameters_of_several_types(two: Cluster, scheme: str) -> None:
    results = two.run(_mixed, scheme)
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][0].isfinite().all()
    if "global" not in scheme:
        assert results[0][1]["bf16.weight"] == torch.float32
        assert results[0][1]["f64.weight"] == torch.float64


def _many_buckets() -> int:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(40, 40) for _ in range(30)))
    ddp = DDP(net, bucket_cap_mb=0.001)
    wire = sw.attach(ddp, "TopK(0.05)", timeout=20)
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(dist.get_rank(), step)[0][:, :40]).sum().backward()
    wire.detach()
    return len(buckets_of(wire))


def test_any_number_of_buckets_on_gloo(four: Cluster) -> None:
    """PyTorch's PowerSGD hook hangs here from four buckets on."""
    assert min(four.run(_many_buckets)) >= 30


def _without(name: str, scheme: str) -> torch.Tensor:
    """A backend that lacks one of the collectives, and sends nothing to all ranks at once."""
    original = getattr(dist, name)

    def unsupported(*_: Any, **__: Any) -> None:
        raise RuntimeError("this backend does not support it")

    setattr(dist, name, unsupported)
    usual, transport.ONE_HOP = transport.ONE_HOP, 0
    try:
        return train_ddp(scheme, 4, attach={"timeout": 31.0})
    finally:
        setattr(dist, name, original)
        transport.ONE_HOP = usual


SINGLE = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


@pytest.mark.parametrize("scheme", [*SCHEMES, "Scheme(TopK(0.05), collective=Sharded())"])
@pytest.mark.parametrize("lacks", [SINGLE, "all_to_all_single", "monitored_barrier"])
def test_backends_that_lack_a_collective(two: Cluster, lacks: str, scheme: str) -> None:
    """Those that gather into lists only, as MPI does; those without all-to-all; those that lack
    nothing that is needed, with messages that go around in a ring."""
    real = two.run(_without, lacks, scheme)
    assert torch.equal(real[0], train_simulated(scheme, 2, 4))


class Branching(nn.Module):
    """Uses its second branch only when told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(64, 64)
        self.two = nn.Linear(64, 64)

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        hidden = self.one(inputs)
        return (self.two(hidden) if both else hidden).square().mean()


def _unused(scheme: str, view: bool) -> tuple[float, float, bool]:
    ddp = DDP(Branching(), find_unused_parameters=True, gradient_as_bucket_view=view)
    wire = sw.attach(ddp, scheme)
    inputs = batch(dist.get_rank(), 0)[0]
    ddp(inputs, True).backward()
    ddp.zero_grad()
    before = wire.state_dict()["memory"]["two.weight"]["residual"]
    ddp(inputs, False).backward()
    after = wire.state_dict()["memory"]["two.weight"]["residual"]
    untouched = ddp.module.two.weight.grad is None
    ddp.zero_grad()
    # used on one rank only: now it takes part on all
    ddp(inputs, dist.get_rank() == 0).backward()
    wire.detach()
    change = (after - before).abs().max()
    return float(before.norm()), float(change), untouched and ddp.module.two.weight.grad is not None


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("scheme", ["TopK(0.05)", "Scheme(TopK(0.05), scope='global')"])
def test_memory_of_an_unused_parameter_is_not_lost(two: Cluster, scheme: str, view: bool) -> None:
    for norm, change, as_expected in two.run(_unused, scheme, view):
        assert norm > 0
        assert change == 0
        assert as_expected


def _channels_last() -> bool:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3))
    plain, last = DDP(copy.deepcopy(net)), DDP(net.to(memory_format=torch.channels_last))
    wires = [sw.attach(model, "BlockRandomK(0.05)") for model in (plain, last)]
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(4, 8, 12, 12, generator=generator)
    for model in (plain, last):
        model(inputs).square().mean().backward()
    kept = [wire.state_dict()["memory"]["2.weight"]["residual"] for wire in wires]
    for wire in wires:
        wire.detach()
    return bool(torch.allclose(kept[0], kept[1], atol=1e-5))


def test_state_does_not_depend_on_the_memory_format(two: Cluster) -> None:
    assert all(two.run(_channels_last))


def _uneven() -> tuple[int, torch.Tensor]:
    from torch.distributed.algorithms.join import Join

    rank = dist.get_rank()
    model = DDP(make_model(), bucket_cap_mb=CAP)
    wire = sw.attach(model, "TopK(0.05)")
    optimizer = sgd(model)
    with Join([model]):
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    steps = wire.steps
    wire.detach()
    return steps, numbers(model)


def test_uneven_inputs_with_join(two: Cluster) -> None:
    results = two.run(_uneven)
    assert [steps for steps, _ in results] == [5, 5]
    assert torch.equal(results[0][1], results[1][1])
