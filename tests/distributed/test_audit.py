"""Ranks that drift apart by what their scripts do are found out, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw

from ..cluster import Cluster
from .training import CAP, loss_of, make_model, sgd


def _drift(how: str, options: dict[str, Any]) -> list[str]:
    """What this rank's steps raise, with an audit before every third one."""
    model = DDP(make_model(), bucket_cap_mb=CAP)
    optimizer = sgd(model)
    wire = sw.attach(model, "TopK(0.05)", optimizer=optimizer, audit_every=3, **options)
    rank, said = dist.get_rank(), []
    for step in range(8):
        try:
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            if rank == 1 and step == 3 and how == "step under no_sync":
                with model.no_sync():
                    loss_of(model, rank, step).backward()
                optimizer.step()
            if rank == 1 and step == 3 and how == "loaded":
                state = {name: w + 1e-3 for name, w in model.module.state_dict().items()}
                model.module.load_state_dict(state)
        except (RuntimeError, sw.errors.SparsewireError) as error:
            said.append(f"{step}: {error}")
    wire.detach()
    return said


GRADIENTS = {"communicate": "gradients"}


@pytest.mark.parametrize("how", ["step under no_sync", "loaded"])
def test_a_rank_that_drifts_is_named_on_all(four: Cluster, how: str) -> None:
    results = four.run(_drift, how, GRADIENTS)
    for said in results:
        assert said == results[0]
        assert said[0].startswith("6: "), "at the next audit"
        assert "rank 1 of 4 differs in 0." in said[0]
        assert len(said) == 2, "the same again until it is mended"
    taken = "the optimizer has taken 6, 7, 6, 6 steps" in results[0][0]
    assert taken is (how == "step under no_sync")


def test_a_changed_model_is_found_where_updates_are_exchanged(two: Cluster) -> None:
    results = two.run(_drift, "loaded", {"communicate": "updates"})
    for said in results:
        assert said == results[0]
        assert "all 2 ranks differ in 0." in said[0]


@pytest.mark.parametrize("options", [GRADIENTS, {**GRADIENTS, "intra_node": 2}])
def test_ranks_that_stay_together_pass(four: Cluster, options: dict[str, Any]) -> None:
    assert four.run(_drift, "not at all", options) == [[]] * 4


def _extra_backward() -> list[str]:
    """Rank 1 calls backward once more in step 3, so that its exchanges pair with later steps."""
    model = DDP(make_model(), bucket_cap_mb=CAP)
    optimizer = sgd(model)
    wire = sw.attach(
        model, "TopK(0.05)", optimizer=optimizer, communicate="gradients", audit_every=3
    )
    rank, said, backwards = dist.get_rank(), [], 0
    step = 0
    while backwards < 9:  # all ranks make as many, or they would wait for each other
        optimizer.zero_grad()
        for _ in range(2 if rank == 1 and step == 3 else 1):
            try:
                loss_of(model, rank, step).backward()
            except RuntimeError as error:
                said.append(str(error))
            backwards += 1
        optimizer.step()
        step += 1
    wire.detach()
    return said


def test_one_backward_more_is_found_out(two: Cluster) -> None:
    for said in two.run(_extra_backward):
        assert said
        assert "all 2 ranks differ in" in said[0]
        assert "the optimizer has taken 6, 5 steps on ranks 0, 1, …" in said[0]


def _out_of_step(options: dict[str, Any]) -> tuple[str, str]:
    """Rank 1 goes back by a step, to one before an audit, or the others do."""
    said = []
    for back in ([1], [0, 2, 3]):
        model = DDP(make_model(), bucket_cap_mb=CAP)
        optimizer = sgd(model)
        wire = sw.attach(model, "TopK(0.05)", optimizer=optimizer, audit_every=3, **options)
        for step in range(3):
            saved = wire.state_dict()
            loss_of(model, dist.get_rank(), step).backward()
            optimizer.step()
        if dist.get_rank() in back:
            wire.load_state_dict(saved)
        try:
            loss_of(model, dist.get_rank(), 3).backward()
            optimizer.step()
        except RuntimeError as error:
            said.append(str(error))
        wire.detach()
    return said[0], said[1]


@pytest.mark.parametrize("communicate", ["gradients", "updates"])
@pytest.mark.parametrize("more", [{}, {"intra_node": 2}])
def test_ranks_out_of_step_where_an_audit_is_due(
    four: Cluster, communicate: str, more: dict[str, Any]
) -> None:
    """They are told by the headers, at once, and not by the deadline."""
    options = {"communicate": communicate, "timeout": 10.0, **more}
    who = "rank 1 of machine 0" if more else "rank 1 of 4"
    for first, second in four.run(_out_of_step, options):
        assert f"{who} disagrees with the others" in first
        assert "disagree" in second
