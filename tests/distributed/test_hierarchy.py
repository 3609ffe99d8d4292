"""Two nodes of two ranks: dense inside, sparse between, and the same numbers on all four."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw
from sparsewire.digest import seal

from ..cluster import Cluster
from ..patience import patience
from .training import CAP, loss_of, make_model, numbers, sgd, train_ddp


def _intra_node(how: str) -> Any:
    if how == "mesh":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))["local"]
    if how == "group":
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        return groups[dist.get_rank() // 2]
    return 2


def _train(scheme: str, how: str, attach: dict[str, Any] | None = None) -> torch.Tensor:
    return train_ddp(scheme, attach={"intra_node": _intra_node(how), **(attach or {})})


def _by_hand(scheme: str) -> torch.Tensor:
    """Two workers, each with the mean gradient of its node, in one process."""
    model = make_model()
    optimizer = sgd(model)
    named = dict(model.named_parameters())
    states = [sw.functional.init(scheme, named) for _ in range(2)]
    for step in range(20):
        nodes = []
        for first in (0, 2):
            means = {name: torch.zeros_like(p) for name, p in named.items()}
            for rank in (first, first + 1):
                model.zero_grad()
                loss_of(model, rank, step).backward()
                for name, p in named.items():
                    means[name] += copy.deepcopy(p.grad) * 0.5  # type: ignore[operator]
            nodes.append(means)
        mean, states = sw.functional.simulate(nodes, states)
        for name, parameter in named.items():
            parameter.grad = mean[name]
        optimizer.step()
    return numbers(model)


@pytest.mark.parametrize("how", ["mesh", "group", "number"])
@pytest.mark.parametrize(
    "scheme",
    [
        "TopK(0.05)",
        "Scheme(Threshold(0.05), values=TwoBit(), scope='global')",
        "Scheme(TopK(0.05), collective=Sharded())",
    ],
)
def test_nodes_are_averaged_and_exchange_sparsely(four: Cluster, how: str, scheme: str) -> None:
    first, *others = four.run(_train, scheme, how)
    assert all(torch.equal(other, first) for other in others)
    assert torch.equal(first, _by_hand(scheme))


def test_bfloat16_inside_a_node(four: Cluster) -> None:
    wide, narrow = (
        four.run(_train, "TopK(0.05)", "number", {"intra_node_dtype": dtype})
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert all(torch.equal(other, narrow[0]) for other in narrow)
    assert not torch.equal(wide[0], narrow[0])
    assert torch.allclose(wide[0], narrow[0], atol=0.05)


def _resume() -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    def start() -> tuple[nn.Module, torch.optim.Optimizer, sw.SparseHookState]:
        model = DDP(make_model(), bucket_cap_mb=CAP)
        optimizer = sgd(model)
        return model, optimizer, sw.attach(model, "TopK(0.05)", intra_node=2)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
            optimizer.step()

    whole, optimizer, wire = start()
    train(whole, optimizer, 0, 6)
    kept = copy.deepcopy((whole.state_dict(), optimizer.state_dict(), wire.state_dict()))
    train(whole, optimizer, 6, 12)
    wire.detach()
    again, optimizer, wire = start()
    again.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    wire.load_state_dict(kept[2])
    refusals = []
    for bad in ({**kept[2], "local_world_size": 4}, {**kept[2], "rank": 7}):
        try:
            wire.load_state_dict(seal(bad))
        except sw.errors.StateError as error:
            refusals.append(str(error))
    train(again, optimizer, 6, 12)
    wire.detach()
    return numbers(whole), numbers(again), refusals


def test_a_node_resumes_as_if_it_had_never_stopped(four: Cluster) -> None:
    for whole, again, refusals in four.run(_resume):
        assert torch.equal(whole, again)
        assert "machines with 4 ranks each" in refusals[0]
        assert "from rank 7 of 4" in refusals[1]


def _poisoned(on_nonfinite: str) -> tuple[str, list[int], torch.Tensor]:
    model = DDP(make_model(), bucket_cap_mb=CAP)
    optimizer = sgd(model)
    options: dict[str, Any] = {
        "intra_node": 2,
        "on_nonfinite": on_nonfinite,
        "optimizer": optimizer,
    }
    wire = sw.attach(model, "TopK(0.05)", **options)
    found = ""
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, dist.get_rank(), step)
        if step == 1 and dist.get_rank() == 3:
            loss = loss * float("nan")
        try:
            loss.backward()
            optimizer.step()
        except RuntimeError as error:
            found = str(error)
    report = wire.report()
    counts = [wire.steps, report.skipped, report.world_size]
    wire.detach()
    return found, counts, numbers(model)


def test_nan_on_one_rank_stops_all_four(four: Cluster) -> None:
    for found, counts, _ in four.run(_poisoned, "raise"):
        assert "NonFiniteError" in found
        assert "machine 1 in" in found
        assert counts == [2, 1, 2]


def test_nan_on_one_rank_is_skipped_by_all_four(four: Cluster) -> None:
    results = four.run(_poisoned, "skip")
    for found, counts, parameters in results:
        assert (found, counts) == ("", [2, 1, 2])
        assert torch.equal(parameters, results[0][2])


def _refused(intra_node: Any, environment: str | None = None) -> str:
    import os

    if environment is not None:
        os.environ["LOCAL_WORLD_SIZE"] = environment
    else:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    if intra_node == "uneven":
        groups = [dist.new_group(ranks) for ranks in ([0], [1, 2, 3])]
        intra_node = groups[dist.get_rank() > 0]
    if intra_node == "grid":
        intra_node = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    model = DDP(make_model())
    try:
        sw.attach(model, "TopK(0.05)", intra_node=intra_node).detach()
    except sw.errors.AttachError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("intra_node", "environment", "words"),
    [
        (3, None, "intra_node=3 makes no sense for 4 ranks"),
        (0, None, "intra_node=0 makes no sense"),
        ("local", None, "LOCAL_WORLD_SIZE"),
        ("local", "3", "intra_node=3 makes no sense"),
        ("uneven", None, "evenly"),
        ("grid", None, "one dimension of a mesh"),
    ],
)
def test_nodes_that_make_no_sense_are_refused(
    four: Cluster, intra_node: Any, environment: str | None, words: str
) -> None:
    for said in four.run(_refused, intra_node, environment):
        assert words in said


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, "bfloat16"])
def test_nodes_add_up_real_numbers_only(four: Cluster, dtype: object) -> None:
    for said in four.run(_refused_dtype, dtype):
        assert "intra_node_dtype must be a floating-point type" in said


def _refused_dtype(dtype: Any) -> str:
    try:
        sw.attach(DDP(make_model()), "TopK(0.05)", intra_node=2, intra_node_dtype=dtype).detach()
    except sw.errors.AttachError as error:
        return str(error)
    return ""


def test_torchrun_says_how_many_ranks_a_machine_has(four: Cluster) -> None:
    assert four.run(_refused, "local", "2") == [""] * 4


def _step(model: nn.Module, wire: sw.SparseHookState, step: int) -> tuple[str, float]:
    """The error that a backward pass raises, if any, and how long it took."""
    model.zero_grad()
    began = time.monotonic()
    try:
        loss_of(model, dist.get_rank(), step).backward()
    except RuntimeError:
        return f"{type(wire.error).__name__}: {wire.error}", time.monotonic() - began
    return "", time.monotonic() - began


def _start() -> tuple[nn.Module, torch.optim.Optimizer, sw.SparseHookState]:
    model = DDP(make_model(), bucket_cap_mb=CAP)
    optimizer = sgd(model)
    return model, optimizer, sw.attach(model, "TopK(0.05)", intra_node=2)


def _flip_inside(what: str) -> tuple[str, Any]:
    """Rank 3 gets one bit wrong from the leader of its machine, and the step is repeated."""
    model, optimizer, wire = _start()
    told = ""
    for step in range(4):
        if step == 2 and dist.get_rank() == 3:
            transport = wire._pipeline.meeting.hierarchy._inside._transport  # type: ignore[union-attr]
            plain = getattr(transport, what)

            def flip(*arguments: Any, plain: Any = plain, transport: Any = transport) -> Any:
                work = plain(*arguments)
                work.wait()
                if arguments[0].numel() > 4096:  # not a header
                    arguments[0].view(-1)[2048 + 9 if what == "show" else 9] ^= 16
                    setattr(transport, what, plain)
                return work

            setattr(transport, what, flip)
        if step == 2:
            told, _ = _step(model, wire, step)
        again, _ = _step(model, wire, step)
        assert not again
        optimizer.step()
    wire.detach()
    return told, numbers(model)


@pytest.mark.parametrize("what", ["show", "deliver", "gather"])
def test_what_arrives_corrupt_inside_a_machine_stops_all_four(four: Cluster, what: str) -> None:
    """The mean that a leader hands on, and both legs of the sum."""
    first, *others = four.run(_flip_inside, what)
    found = "CorruptMessageError: the message of rank 0 of machine 1 that rank 1"
    assert first[0].startswith(found)
    for told, weights in others:
        assert told == first[0]
        assert torch.equal(weights, first[1])
    assert torch.equal(first[1], four.run(train_ddp, "TopK(0.05)", 4, None, {"intra_node": 2})[0])


def _out_of_step(odd: int) -> tuple[tuple[str, float], str]:
    model, optimizer, wire = _start()
    assert _step(model, wire, 0)[0] == ""
    optimizer.step()
    if dist.get_rank() == odd:
        wire._session.steps += 1
    ended = _step(model, wire, 1)
    if dist.get_rank() == odd:
        wire._session.steps -= 1
    again, _ = _step(model, wire, 1)
    wire.detach()
    return ended, again


@pytest.mark.parametrize(("odd", "words"), [(2, "rank 1 of machine 1"), (3, "rank 1 of machine 1")])
def test_a_rank_out_of_step_with_its_machine_is_told_to_all_four(
    four: Cluster, odd: int, words: str
) -> None:
    """Of two ranks that differ, the one that does not lead is the odd one."""
    for (told, took), again in four.run(_out_of_step, odd):
        expected = f"DisagreementError: {words} disagrees with the others of its machine"
        assert told.startswith(expected)
        assert took < patience(10)
        assert again == ""


class _OwnError(sw.errors.ExchangeError):
    """An error that followers do not know."""


def _leader_fails(kind: str) -> tuple[str, float]:
    model, _, wire = _start()
    assert _step(model, wire, 0)[0] == ""
    if dist.get_rank() == 2:

        def fail(*_: object) -> Any:
            raise {"own": _OwnError, "memory": MemoryError}[kind]("no room left")

        wire._session.store.open = fail  # type: ignore[method-assign]
    return _step(model, wire, 1)


@pytest.mark.parametrize("kind", ["own", "memory"])
def test_any_error_of_a_leader_reaches_all_four_at_once(fresh: Any, kind: str) -> None:
    for told, took in fresh(4).run(_leader_fails, kind):
        assert "no room left" in told
        assert took < patience(10)
