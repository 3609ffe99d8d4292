"""FSDP2 on a 2 × 2 mesh: shards are exchanged over replicas, status is compared over all ranks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import sparsewire as sw
from sparsewire.exchange import NonFinite
from sparsewire.groups import drive
from sparsewire.requests import Request
from sparsewire.session import Session, Topology, Transaction

from ..cluster import Cluster

pytestmark = pytest.mark.xdist_group("ranks 1")  # where four ranks are kept running
LAYERS = (0, 2, 4)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 65), nn.ReLU(), nn.Linear(65, 65), nn.ReLU(), nn.Linear(65, 10)
    )


class MeshGroup:
    """Carries each request in the group that it names."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.groups = {
            "exchange": sw.groups.DistributedGroup(mesh.get_group("replicate")),
            "status": sw.groups.DistributedGroup(),
        }
        self.rank, self.size = self.groups["exchange"].rank, self.groups["exchange"].size
        self.doing = ""

    def start(self, request: Request) -> Any:
        group = self.groups[request.group]
        return group, group.start(request)

    def wait(self, ticket: Any) -> Any:
        return ticket[0].wait(ticket[1])

    def abandon(self, error: sw.errors.ExchangeError) -> None:
        self.groups["status"].abandon(error)


class Replicas:
    """Exchanges the shards of every layer with those of the other replica, as they are made."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, scheme: str) -> None:
        self.group = MeshGroup(mesh)
        self.layers = {
            index: {f"{index}.{name}": p for name, p in model[index].named_parameters()}
            for index in LAYERS
        }
        shapes = {
            name: tuple(p.to_local().shape)
            for layer in self.layers.values()
            for name, p in layer.items()
        }
        place = Topology(self.group.rank, 2, status_rank=dist.get_rank())
        self.session = Session(sw.parse(scheme), shapes, place)
        self.transaction: Transaction | None = None
        for index in LAYERS:
            model[index].set_force_sum_reduction_for_comms(True)  # Gloo makes no averages
            model[index].set_all_reduce_hook(partial(self.hook, index))

    def hook(self, index: int, flat: Tensor) -> None:
        self.transaction = self.transaction or self.session.begin()
        shapes = {name: self.session.shapes[name] for name in self.layers[index]}
        unit = self.transaction.unit(index, shapes, flat.dtype, flat.device)
        at, pairs = 0, []
        for name, view in unit.views():
            pairs.append((view, flat[at : at + view.numel()].view(view.shape)))
            padded = -(-self.layers[index][name].shape[0] // 2), *view.shape[1:]
            at += math.prod(padded)
        for view, part in pairs:
            view.copy_(part)
        routine = self.transaction.exchange(unit, LAYERS.index(index))
        drive(routine, self.group, self.session.counters)
        for view, part in pairs:
            part.copy_(view)

    def finish(self) -> NonFinite | None:
        """Return what is wrong with the step, if anything."""
        assert self.transaction is not None
        found = drive(self.transaction.agree(), self.group, self.session.counters)
        if found is None:
            self.transaction.commit()
        else:
            self.transaction.rollback()
        self.transaction = None
        return found


def train(scheme: str | None, spoiled: int | None = None, steps: int = 6) -> tuple[Any, ...]:
    """Train on this rank, with torch's own HSDP if no scheme is given.

    Returns the weights, what was found in the last step, and the residuals.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    for index in LAYERS:
        fully_shard(model[index], mesh=mesh if scheme is None else mesh["shard"])
        model[index].set_force_sum_reduction_for_comms(True)
    replicas = Replicas(model, mesh, scheme) if scheme else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    found = None
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(8, 32, generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), inputs.abs().argmax(1) % 10)
        if step == steps - 1 and dist.get_rank() == spoiled:
            loss = loss * float("nan")
        loss.backward()
        found = replicas.finish() if replicas else None
        if found is None:
            optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])
    return weights, found, replicas and replicas.session.steps


def test_sending_everything_is_torchs_own_hsdp(four: Cluster) -> None:
    expected = four.run(train, None)[0][0]
    for weights, _, _ in four.run(train, "Dense()"):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_replicas_hold_the_same_bits(four: Cluster) -> None:
    ends = four.run(train, "Scheme(TopK(0.05), dense_below=64)")
    assert all(torch.equal(weights, ends[0][0]) for weights, _, _ in ends)
    assert not torch.equal(ends[0][0], four.run(train, "Dense()")[0][0])


@pytest.mark.parametrize("spoiled", [0, 3])
def test_all_four_ranks_leave_out_what_one_found_bad(four: Cluster, spoiled: int) -> None:
    ends = four.run(train, "TopK(0.05)", spoiled)
    before = four.run(train, "TopK(0.05)", None, 5)
    for (weights, found, steps), (expected, _, _) in zip(ends, before, strict=True):
        assert found is not None
        assert steps == 5
        assert torch.equal(weights, expected)
