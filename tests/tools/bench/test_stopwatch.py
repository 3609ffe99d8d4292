"""A step's parts add up, whatever overlaps; a contender leaves nothing behind on the model."""

from __future__ import annotations

import gc
import itertools
import weakref
from time import perf_counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsewire.adapters.updates import SAMPLE
from sparsewire.counters import STAGES
from sparsewire.message import bytes_with_checksum
from sparsewire.tools.bench.contenders import COMPUTE, DENSE, Entry
from sparsewire.tools.bench.step.stopwatch import PARTS, Marks, Step, split, steps
from tests.cluster import Cluster

MARKS = Marks(began=0.0, forwarded=2.0, last_gradient=5.0, returned=9.0, ended=10.0)
TIMES = st.floats(2.0, 9.0)


def test_parts_of_a_step() -> None:
    found = split(
        MARKS,
        [
            ("select", 3.0, 4.0),  # hidden
            ("exchange", 4.0, 6.0),  # half hidden
            ("decode", 6.0, 6.5),
            ("exchange", 7.0, 9.0),
        ],
    )
    assert found.parts == {
        "forward": 2.0,
        "backward": 3.0,
        "select": 0.0,
        "encode": 0.0,
        "exchange": 3.0,
        "decode": 0.5,
        "wait": 0.5,
        "optimizer": 1.0,
    }
    assert found.busy["exchange"] == 4.0
    assert found.hidden == {"select": 1.0, "encode": 0.0, "exchange": 1.0, "decode": 0.0}
    assert found.seconds == 10.0


def test_an_exchange_in_the_optimizers_step() -> None:
    found = split(MARKS, [("select", 9.1, 9.2), ("exchange", 9.3, 9.7)])
    assert found.parts["exchange"] == pytest.approx(0.4)
    assert found.parts["select"] == pytest.approx(0.1)
    assert found.parts["optimizer"] == pytest.approx(0.5)
    assert found.seconds == pytest.approx(10.0)


def test_no_exchange_at_all() -> None:
    found = split(MARKS, [])
    assert found.parts["wait"] == 4.0
    assert found.seconds == 10.0


def test_an_exchange_beside_other_work_costs_nothing_more() -> None:
    found = split(MARKS, [("exchange", 5.0, 9.0), ("select", 6.0, 7.0)])
    assert found.parts["exchange"] == 3.0
    assert found.parts["select"] == 1.0
    assert found.parts["wait"] == 0.0


@given(st.lists(st.tuples(st.sampled_from(STAGES), TIMES, TIMES), max_size=8))
def test_parts_always_add_up(stages: list[tuple[str, float, float]]) -> None:
    found = split(MARKS, [(name, min(a, b), max(a, b)) for name, a, b in stages])
    assert tuple(found.parts) == PARTS
    assert all(seconds >= 0 for seconds in found.parts.values())
    assert found.seconds == pytest.approx(10.0)
    for stage in STAGES:
        assert 0 <= found.hidden[stage] <= found.busy[stage] + 1e-9
        assert found.parts[stage] <= found.busy[stage] - found.hidden[stage] + 1e-9


def _take(names: list[str]) -> list[dict[str, Any]]:
    """Steps with several contenders in turn, on one rank."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from sparsewire.tools.tasks.workloads import Workload

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 4))
    workload = Workload(net, lambda model: model(torch.ones(2, 64)).square().mean())
    told = []
    for name in names:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        entry = Entry(name, net, optimizer, perf_counter, 30)
        taking = steps(entry, workload, optimizer, dist.barrier)
        taken: list[Step] = list(itertools.islice(taking, 4))
        sent, asked = entry.sent(dist.get_world_size()), len(entry.starts)
        wrapper = weakref.ref(entry.model)
        taking.close()
        entry.leave()
        gc.collect()
        gone = wrapper() is None or wrapper() is net
        told.append({"taken": taken, "sent": sent, "asked": asked, "gone": gone})
    return told


@pytest.mark.xdist_group("ranks 1")  # where two ranks are kept running
def test_contenders_follow_each_other_on_one_model(two: Cluster) -> None:
    names = [DENSE, COMPUTE, "TopK(0.1)", "PowerSGD rank 1", COMPUTE, "updates TopK(0.1)"]
    for told in two.run(_take, names):
        assert all(turn["gone"] for turn in told), "DDP still lives, and acts on the model"
        dense, alone, sparse, low_rank, again, updates = told
        assert dense["asked"] == 1
        assert dense["sent"] == 4 * 4 * (64 * 256 + 256 + 256 * 4 + 4)  # a ring of two
        assert 0 < sparse["sent"] < dense["sent"]
        assert 0 < low_rank["sent"] < dense["sent"]
        compared = 2 * bytes_with_checksum(4 * SAMPLE)  # in rounds 1 and 2
        assert updates["sent"] == sparse["sent"] + compared
        assert alone["sent"] == again["sent"] == 0
        for turn in (alone, again):
            assert all(not any(step.busy.values()) for step in turn["taken"])
        for turn in (sparse, dense, updates):
            assert all(step.busy["exchange"] > 0 for step in turn["taken"])
