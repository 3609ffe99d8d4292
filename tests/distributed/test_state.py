"""Stop and resume on real processes: bit-equal to a run that never stopped, or refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw
from sparsewire.digest import seal
from sparsewire.shards import owners
from sparsewire.state import OWNED

from ..cluster import Cluster
from .training import CAP, buckets_of, loss_of, make_model, numbers, sgd

RESUMED = [
    "TopK(0.05)",
    "Threshold(0.05)",
    "RandomK(0.05)",
    "BlockRandomK(0.05)",
    "TopBlock(0.05, block=16)",
    "Scheme(LeaderTopK(0.05), memory=MomentumCorrection(0.9))",
    "Scheme(UnionTopK(0.05), memory=MomentumCorrection(0.9))",
    "Scheme(TopK(0.05), scope='global', values=BFloat16())",
    "Scheme(RandomK(0.05), scope=300, values=Float16())",
    "Scheme(TopK(0.05), memory=MomentumCorrection(0.9, nesterov=True))",
    "Scheme(TopK(0.05), values=QSGD())",
    "Scheme(Threshold(0.05), values=OneBit('column'))",
    "Scheme(TopK(0.05), memory=ErrorFeedback('bfloat16'))",
    "Scheme(RandomK(0.05), scope='global', memory=MomentumCorrection(dtype='bfloat16'))",
    "Scheme(TopK(0.05), collective=Sharded())",
    "Scheme(Threshold(0.05), values=TwoBit(), scope='global', collective=Sharded(0.02))",
    "Warmup(TopK(0.05), steps=7, ease=True)",
    "Warmup(Scheme(TopK(0.05), collective=Sharded()), steps=7)",
    "Warmup(Scheme(TopK(0.05), collective=Sharded()), steps=7, ease=True)",
    "Warmup(Scheme(TopK(0.05), scope='global'), steps=7)",
]


def _through_a_file(value: Any) -> Any:
    """As saved and loaded, without unpickling anything but tensors and plain values."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()


def _stop_and_resume(scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    def start() -> tuple[DDP, torch.optim.Optimizer, sw.SparseHookState]:
        # buckets in the order of construction first, rebuilt in the order of backward then
        model = DDP(make_model(), bucket_cap_mb=CAP)
        optimizer = sgd(model)
        return model, optimizer, sw.attach(model, scheme, optimizer=optimizer)

    whole, optimizer, wire = start()
    _train(whole, optimizer, 0, 12)
    wire.detach()

    model, optimizer, wire = start()
    _train(model, optimizer, 0, 5)
    saved = _through_a_file(
        {"model": model.state_dict(), "opt": optimizer.state_dict(), "wire": wire.state_dict()}
    )
    wire.detach()
    model, optimizer, wire = start()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["opt"])
    wire.load_state_dict(saved["wire"])
    _train(model, optimizer, 5, 12)
    assert wire.steps == 12
    wire.detach()
    return numbers(whole), numbers(model)


@pytest.mark.parametrize("scheme", RESUMED)
def test_resumed_equals_never_stopped(four: Cluster, scheme: str) -> None:
    for whole, resumed in four.run(_stop_and_resume, scheme):
        assert torch.equal(whole, resumed)


def _resume_with(cap: float) -> tuple[torch.Tensor, bool]:
    """Parameters after a stop and a new start, and whether buckets were others then."""
    model = DDP(make_model(), bucket_cap_mb=CAP)
    optimizer = sgd(model)
    wire = sw.attach(model, "RandomK(0.05)")
    _train(model, optimizer, 0, 4)
    before = buckets_of(wire)
    saved = copy.deepcopy((model.state_dict(), wire.state_dict()))
    wire.detach()
    model = DDP(make_model(), bucket_cap_mb=cap)
    optimizer = sgd(model)
    wire = sw.attach(model, "RandomK(0.05)")
    model.load_state_dict(saved[0])
    wire.load_state_dict(saved[1])
    _train(model, optimizer, 4, 8)
    after = buckets_of(wire)
    wire.detach()
    return numbers(model), before != after


def test_resume_with_other_buckets(four: Cluster) -> None:
    kept, changed = four.run(_resume_with, CAP), four.run(_resume_with, 0.001)
    for (same, as_before), (other, differs) in zip(kept, changed, strict=True):
        assert (as_before, differs) == (False, True)
        assert torch.equal(same, other)


def _refusals() -> dict[str, str]:
    model = DDP(make_model(), bucket_cap_mb=CAP)
    wire = sw.attach(model, "TopK(0.05)")
    loss_of(model, dist.get_rank(), 0).backward()
    good = wire.state_dict()
    before = copy.deepcopy(good)
    messages = {}

    def refuses(key: str, state: Any) -> None:
        try:
            wire.load_state_dict(state)
        except sw.errors.StateError as error:
            messages[key] = str(error)

    def refused(key: str, **changes: Any) -> None:
        refuses(key, seal({**copy.deepcopy(good), **changes}))  # as if it had been saved so

    kept = good["memory"]
    refused("scheme", scheme="Scheme(TopK(0.1))", identity="another")
    refused("rank", rank=dist.get_rank() + 1)
    refused("world", world_size=99)
    refuses("format", {**good, "format": 1})
    refuses("no format", {**good, "format": None})
    refuses("digest", {**good, "step": 2})
    refuses("list", [good, good])
    refused("step", step="x")
    refused("late", step=1 << 63)
    refused("rate", scaling={"rates": {"0.weight": float("nan")}, "scale": None})
    refused("scale", scaling={"rates": {}, "scale": 0.0})
    refused("updates", updates={})
    refused(
        "scaling",
        scaling={},
        memory={n: {"residual": 0 * m["residual"]} for n, m in good["memory"].items()},
    )
    refused("no memory", memory=None)
    refused("missing", memory={n: m for n, m in kept.items() if n != "0.weight"})
    refused("foreign", memory={**kept, "x": {"residual": torch.zeros(1)}})
    refused("shape", memory={**kept, "0.weight": {"residual": torch.zeros(3)}})
    refused("nan", memory={**kept, "0.bias": {"residual": torch.full((96,), torch.nan)}})
    after = wire.state_dict()
    for name, fields in before["memory"].items():
        assert torch.equal(fields["residual"], after["memory"][name]["residual"])
    wire.load_state_dict(seal({**good, "identity": "another"}), strict=False)
    wire.detach()
    return messages


def test_state_that_does_not_fit_is_refused(two: Cluster) -> None:
    messages = two.run(_refusals)[0]
    expected = {
        "scheme": "Scheme(TopK(0.1))",
        "rank": "rank 1 of 2",
        "world": "of 99, and this is rank 0 of 2: to resume with another number of ranks, pass the",
        "format": "format 1, and this version of sparsewire reads 3",
        "no format": "state_dict()",
        "digest": "its digest does not match",
        "list": "this is a list of 2 states, and a rank resumes from its own",
        "step": "'x'",
        "late": "a whole number from 0 to 2^63 - 1",
        "rate": "not positive, finite numbers",
        "scale": "not positive, finite numbers",
        "updates": "from an exchange of updates",
        "scaling": "learning rates",
        "no memory": "not a mapping of tensors by parameter",
        "missing": "0.weight",
        "foreign": "contains x",
        "shape": "residual of 0.weight has shape (3,)",
        "nan": "0.bias",
    }
    assert messages.keys() == expected.keys()
    for key, text in expected.items():
        assert text in messages[key]


# -- another number of ranks ---------------------------------------------------------------------

STEPS = 40  # until the number of ranks changes, and as many after it
RESIZED: list[tuple[str, dict[str, Any]]] = [
    ("Scheme(TopK(0.1), dense_below=64)", {}),
    ("Scheme(TopK(0.1), memory=MomentumCorrection(0.9))", {}),
    ("Scheme(TopK(0.1), collective=Sharded())", {}),
    ("Scheme(RandomK(0.2), collective=AllReduce())", {"communicate": "updates", "every": 2}),
    ("TopK(0.1)", {"communicate": "updates", "delay": 1}),
]


def _lesson(part: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One of the four parts of a batch, with something to learn."""
    generator = torch.Generator().manual_seed(10 * step + part)
    inputs = torch.randn(16, 64, generator=generator)
    return inputs, inputs[:, :10].argmax(1)


def _go_on(
    scheme: str, options: dict[str, Any], saved: list[dict[str, Any]], first: int, last: int
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Train from what all ranks of another number saved, on the same batches.

    Returns what this rank saved at once and at the end, and the loss on what was never seen.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_model()
    model = net if options else DDP(net, bucket_cap_mb=CAP)
    optimizer = sgd(model, 0.05, momentum=0.0 if "Momentum" in scheme else 0.9)
    wire = sw.attach(model, scheme, optimizer=optimizer, **options)
    if saved:
        saved = _through_a_file(saved)  # or all ranks would train on the same memory
        own = saved[rank % len(saved)]
        net.load_state_dict(own["model"])
        optimizer.load_state_dict(own["optimizer"])
        wire.load_state_dict([each["wire"] for each in saved], on_world_size_change="resize")
    begun = wire.state_dict()
    for step in range(first, last):
        optimizer.zero_grad()
        for part in range(rank, 4, size):
            inputs, targets = _lesson(part, step)
            is_last = part + size >= 4
            with model.no_sync() if isinstance(model, DDP) and not is_last else nullcontext():
                loss = nn.functional.cross_entropy(model(inputs), targets)
                (loss * size / 4).backward()
        optimizer.step()
    end = {"optimizer": optimizer.state_dict(), "wire": wire.state_dict()}
    end["model"] = net.state_dict()
    net.eval()
    unseen = [_lesson(0, 1_000_000 + number) for number in range(50)]
    with torch.no_grad():
        losses = [float(nn.functional.cross_entropy(net(x), y)) for x, y in unseen]
    wire.detach()
    return begun, _through_a_file(end), sum(losses) / len(losses)


def _pending(states: Sequence[dict[str, Any]]) -> torch.Tensor:
    """What is still to be applied: Σe/W, and what owners of shards keep back."""
    found = []
    for name, kept in states[0]["memory"].items():
        each = [state["memory"][name] for state in states]
        total = sum(one["residual"].double().view(-1) for one in each) / len(states)
        assert isinstance(total, torch.Tensor)
        owner = owners(name, total.numel(), len(states))
        for rank, one in enumerate(each if OWNED in kept else ()):
            total[owner == rank] += one[OWNED].double()
        found.append(total)
    return torch.cat(found)


@pytest.mark.parametrize(("scheme", "options"), RESIZED, ids=str)
def test_a_training_goes_on_with_another_number_of_ranks(
    two: Cluster, four: Cluster, scheme: str, options: dict[str, Any]
) -> None:
    """Four ranks, then two, then four lose nothing that is pending, and learn as well as four."""
    whole = [end for *_, end in four.run(_go_on, scheme, options, [], 0, 3 * STEPS)]
    results = four.run(_go_on, scheme, options, [], 0, STEPS)
    for cluster, first in ((two, STEPS), (four, 2 * STEPS)):
        saved = [end for _, end, _ in results]
        results = cluster.run(_go_on, scheme, options, saved, first, first + STEPS)
        before = _pending([state["wire"] for state in saved])
        after = _pending([begun for begun, _, _ in results])
        assert before.abs().max() > 1e-4
        assert (after - before).abs().max() < 1e-6 * max(1.0, float(before.abs().max()))
        steps = (first + STEPS) // options.get("every", 1)
        assert all(end["wire"]["step"] == steps for _, end, _ in results)
    ends = [end for *_, end in results]
    assert len(set(ends)) == len(set(whole)) == 1  # all ranks hold the same weights
    assert ends[0] < 1.1 * whole[0]  # two ranks and four that never stop differ by up to 20 %


def _on_machines(saved: list[dict[str, Any]]) -> dict[str, Any]:
    """What a rank begins with if two of them share a machine."""
    model = DDP(make_model(), bucket_cap_mb=CAP)
    wire = sw.attach(model, "TopK(0.05)", intra_node=2)
    wire.load_state_dict(saved, on_world_size_change="resize")
    begun = wire.state_dict()
    loss_of(model, dist.get_rank(), 5).backward()
    wire.detach()
    return begun


def _alone_before() -> dict[str, Any]:
    model = DDP(make_model(), bucket_cap_mb=CAP)
    wire = sw.attach(model, "TopK(0.05)")
    for step in range(2):
        loss_of(model, dist.get_rank(), step).backward()
    saved = wire.state_dict()
    wire.detach()
    return saved


def test_ranks_that_share_a_machine_take_over_from_ranks_that_did_not(four: Cluster) -> None:
    """And the other way round: only the first rank of a machine keeps a memory."""
    flat = four.run(_alone_before)
    nodes = four.run(_on_machines, flat)
    assert [bool(state["memory"]["0.weight"]) for state in nodes] == [True, False] * 2
    assert (_pending(nodes[::2]) - _pending(flat)).abs().max() < 1e-7
    again = four.run(_on_machines, nodes)
    assert all(one["digest"] == other["digest"] for one, other in zip(nodes, again, strict=True))


def _rollback() -> bool:
    model = DDP(make_model(), bucket_cap_mb=CAP)
    wire = sw.attach(model, "TopK(0.05)")
    for step in range(2):
        model.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
    model.zero_grad()
    kept = copy.deepcopy(wire.state_dict())
    loss_of(model, dist.get_rank(), 2).backward()
    wire.rollback()
    again = wire.state_dict()
    wire.rollback()  # only one step is remembered: nothing happens
    assert wire.steps == 2 == again["step"]
    wire.detach()
    pairs = ((kept["memory"][n]["residual"], m["residual"]) for n, m in again["memory"].items())
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_step_not_taken_can_be_rolled_back(two: Cluster) -> None:
    assert all(two.run(_rollback))


def _lr_drop(follow: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients with γ inside the memory, and updates of plain SGD, across a drop by 10."""
    rank = dist.get_rank()
    model = DDP(make_model(), bucket_cap_mb=CAP)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wire = sw.attach(model, "TopK(0.05)", optimizer=inner, follow_lr=follow)
    bare = make_model()
    own = torch.optim.SGD(bare.parameters(), lr=0.1)
    updates = sw.attach(bare, "TopK(0.05)", optimizer=own, communicate="updates", step_ahead=0)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 6) for o in (inner, own)]
    for step in range(12):
        for net, optimizer in ((model, inner), (bare, own)):
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    wire.detach()
    updates.detach()
    return numbers(model), numbers(bare)


def test_both_forms_agree_across_a_learning_rate_drop(two: Cluster) -> None:
    for gradients, updates in two.run(_lr_drop, True):
        unlike = (gradients - updates).abs() > 2e-6
        assert unlike.float().mean() < 1e-3  # rounding decides between candidates of one size
    for gradients, updates in two.run(_lr_drop, False):
        assert (gradients - updates).abs().max() > 1e-5
