"""Attaching, detaching and what surrounds them: several models, wrappers, refusals, overlap."""

from __future__ import annotations

import datetime
import gc
import os
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw

from ..cluster import Cluster
from ..patience import patience
from .training import CAP, batch, loss_of, make_model, numbers, sgd, train_simulated


def _overlap(limit: float) -> tuple[float, float]:
    """When the first bucket's exchange was over, and when the last bucket was handed over."""
    net = make_model()
    model = DDP(net, bucket_cap_mb=0.001)
    wire = sw.attach(model, "TopK(0.05)")
    loss_of(model, dist.get_rank(), 0).backward()
    pipeline, exchanged, selection = wire._pipeline, [], []
    first = threading.Event()
    exchange, take = pipeline._exchange, pipeline.take

    def timed_exchange(*arguments: Any) -> None:
        exchange(*arguments)
        exchanged.append(time.monotonic())
        first.set()

    def timed_take(bucket: Any) -> Any:
        selection.append(time.monotonic())
        return take(bucket)

    pipeline._exchange, pipeline.take = timed_exchange, timed_take  # type: ignore[method-assign]

    def wait(_: torch.Tensor) -> None:
        first.wait(limit)

    # backward reaches the first layer last, and takes its time there
    handle = net.get_parameter("0.weight").register_hook(wait)
    loss_of(model, dist.get_rank(), 1).backward()
    handle.remove()
    wire.detach()
    return exchanged[0], selection[-1]


def test_exchange_goes_on_while_backward_does(two: Cluster) -> None:
    for first_exchanged, last_taken in two.run(_overlap, patience(5)):
        assert first_exchanged < last_taken


def _two_models_two_groups() -> list[torch.Tensor]:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    everyone = DDP(make_model(1), bucket_cap_mb=CAP)
    pair = DDP(make_model(2), bucket_cap_mb=CAP, process_group=pairs[rank // 2])
    wires = [sw.attach(everyone, "TopK(0.05)"), sw.attach(pair, "RandomK(0.05)")]
    optimizers = [sgd(everyone), sgd(pair)]
    for step in range(5):
        for model, optimizer in zip((everyone, pair), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert [wire.group.size for wire in wires] == [4, 2]
    for wire in wires:
        wire.detach()
    return [numbers(everyone), numbers(pair)]


def test_several_models_and_groups(four: Cluster) -> None:
    results = four.run(_two_models_two_groups)
    assert all(torch.equal(results[0][0], result[0]) for result in results)
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[2][1], results[3][1])
    assert not torch.equal(results[0][1], results[2][1])


def _detach_and_attach_again() -> list[bool]:
    rank = dist.get_rank()
    model, plain = DDP(make_model(), bucket_cap_mb=CAP), DDP(make_model(), bucket_cap_mb=CAP)
    seen = []
    wire = sw.attach(model, "TopK(0.05)")
    for phase in range(3):
        for net in (model, plain):
            net.zero_grad()
            loss_of(net, rank, phase).backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        seen.append(all(torch.equal(a.grad, b.grad) for a, b in pairs))
        if phase == 0:
            wire.detach()
        elif phase == 1:
            wire = sw.attach(model, "RandomK(0.05)")
    wire.detach()
    return seen


def test_detach_gives_plain_ddp_back(two: Cluster) -> None:
    assert two.run(_detach_and_attach_again) == [[False, True, False]] * 2


def _registered(options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The weights after DDP's own way in, after `attach`, and of plain DDP after a detach."""
    ends = []
    for way in ("register", "attach", "detached"):
        model = DDP(make_model(), bucket_cap_mb=CAP)
        if way == "attach":
            state = sw.attach(model, "TopK(0.05)", **options)
        else:
            state = sw.SparseHookState(model, "TopK(0.05)", **options)
            model.register_comm_hook(state, sw.sparse_hook)
        if way == "detached":
            state.detach()
            state = sw.attach(model, "Dense()")  # by the hook that is there already
        optimizer = sgd(model)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
            optimizer.step()
        assert state.steps == 4
        state.detach()
        ends.append(numbers(model))
    return tuple(ends)


def test_ddps_own_way_in(two: Cluster) -> None:
    limit = datetime.timedelta(seconds=patience(30))
    ends = two.run(_registered, {"timeout": limit})
    assert torch.equal(ends[0][0], ends[0][1])
    assert torch.equal(ends[0][0], train_simulated("TopK(0.05)", 2, 4))
    assert torch.equal(ends[0][2], train_simulated("Dense()", 2, 4))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def _attach_often() -> tuple[int, int, int]:
    """Pipelines alive, and open files before and after, when attaching again and again."""
    model = DDP(make_model(), bucket_cap_mb=CAP)
    pipelines, files = [], []
    for _ in range(12):
        wire = sw.attach(model, "TopK(0.05)")
        loss_of(model, dist.get_rank(), 0).backward()
        wire.detach()
        pipelines.append(weakref.ref(wire._pipeline))
        del wire
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")))
    return sum(p() is not None for p in pipelines), files[2], files[-1]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_detach_leaves_nothing_behind(two: Cluster) -> None:
    for alive, early, late in two.run(_attach_often):
        assert alive <= 1  # DDP may hold the futures of its last backward
        assert late <= early


def _refusals() -> dict[str, str]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    found = {}

    def refused(key: str, *arguments: Any, **options: Any) -> None:
        try:
            sw.attach(*arguments, **options)
        except sw.errors.AttachError as error:
            found[key] = str(error)

    selection = DDP(make_model())
    selection.register_comm_hook(None, fp16_compress_hook)
    refused("taken", selection, "TopK(0.01)")
    model = DDP(make_model())
    wire = sw.attach(model, "TopK(0.01)")
    refused("twice", model, "TopK(0.01)")
    wire.detach()
    refused("no ddp", make_model(), "TopK(0.01)")
    refused("sparse", DDP(nn.Embedding(10, 64, sparse=True)), "TopK(0.01)")
    corrected = "Scheme(TopK(0.01), memory=MomentumCorrection())"
    refused("blind", model, corrected)
    refused("momentum", model, corrected, optimizer=sgd(model, momentum=0.9))
    refused("adam", model, corrected, optimizer=torch.optim.AdamW(model.parameters()))
    refused("follow", model, "TopK(0.01)", follow_lr=True)
    refused("mode", model, "TopK(0.01)", on_nonfinite="ignore")
    refused("timeout", model, "TopK(0.01)", timeout=0)
    refused("class", model, "TopK(0.01)", optimizer=torch.optim.SGD)
    refused("parameters", model, "TopK(0.01)", optimizer=[*model.parameters()])
    refused("another", model, "TopK(0.01)", optimizer=sgd(make_model()))
    refused("scaler", model, "TopK(0.01)", scaler=True)
    sw.attach(model, corrected, optimizer=sgd(model)).detach()
    return found


def test_what_cannot_work_is_refused_with_a_remedy(two: Cluster) -> None:
    found = two.run(_refusals)[0]
    remedies = {
        "taken": "values=BFloat16()",
        "twice": "detach()",
        "no ddp": "DDP(model)",
        "sparse": "sparse=False",
        "blind": "optimizer=optimizer",
        "momentum": "without momentum",
        "adam": "without momentum",
        "follow": "optimizer=optimizer",
        "mode": "'skip'",
        "timeout": "above 0",
        "class": "torch.optim.SGD(model.parameters(), lr=0.1)",
        "parameters": "torch.optim.SGD(model.parameters(), lr=0.1)",
        "another": "Pass the one that steps this model",
        "scaler": "the GradScaler of the training loop",
    }
    assert found.keys() == remedies.keys()
    for key, remedy in remedies.items():
        assert remedy in found[key]


def _compiled(scheme: str) -> tuple[list[str], torch.Tensor]:
    ddp = DDP(torch.compile(make_model(), backend="eager"))
    model = torch.compile(ddp, backend="eager")
    wire = sw.attach(model, scheme)
    optimizer = sgd(model)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
    names = sorted(wire.state_dict()["memory"])
    wire.detach()
    return names, numbers(model)


def test_compiled_models_are_unwrapped(two: Cluster) -> None:
    results = two.run(_compiled, "TopK(0.05)")
    assert results[0][0] == sorted(name for name, _ in make_model().named_parameters())
    assert torch.equal(results[0][1], train_simulated("TopK(0.05)", 2, 8))


def _never_called() -> list[str]:
    import warnings

    net, other = make_model(), make_model()
    ddp = DDP(net)
    wire = sw.attach(ddp, "TopK(0.05)")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in (other, net):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.step()  # does not count: there is no gradient yet
            for step in range(4):
                assert not caught or (model is net and step >= 2)
                model(batch(0, step)[0]).sum().backward()  # not that of DDP, who would meet peers
                optimizer.step()
    wire.detach()
    return [str(warning.message) for warning in caught]


def test_a_hook_that_is_never_called_is_reported(two: Cluster) -> None:
    messages = two.run(_never_called)[0]
    assert len(messages) == 1
    assert "not called it in the first two steps" in messages[0]


def _stats_by_step() -> tuple[list[dict[str, float]], dict[str, float], float]:
    model = DDP(make_model(), bucket_cap_mb=CAP)
    wire = sw.attach(model, "TopK(0.05)")
    rows = [wire.stats()]
    for step in range(4):
        model.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        rows.append(wire.stats())
    kept = wire.state_dict()["memory"].values()
    norm = torch.cat([fields["residual"].reshape(-1) for fields in kept]).norm()
    totals = wire.report().to_dict()
    wire.detach()
    return rows, totals, float(norm)


def test_stats_are_those_of_the_last_step(two: Cluster) -> None:
    """The totals are their sum; before the first step there is nothing."""
    for rows, totals, norm in two.run(_stats_by_step):
        assert [row["steps"] for row in rows] == [0, 1, 2, 3, 4]
        assert set(rows[0].values()) == {0, 1.0}
        for key in ("bytes_sent", "bytes_received", "dense_bytes", "selected", "aimed_at"):
            assert sum(row[key] for row in rows) == pytest.approx(totals[key], abs=4), key
        assert rows[-1]["bytes_sent"] == rows[-2]["bytes_sent"] > 0
        assert sum(row["seconds_select"] for row in rows) == pytest.approx(totals["seconds_select"])
        assert rows[-1]["gradient_norm"] == totals["gradient_norm"] > 0
        assert rows[-1]["memory_norm"] == pytest.approx(norm, rel=1e-5)  # small: all is looked at
        assert totals["memory_norm"] == pytest.approx(norm, rel=1e-5)
