"""What ranks of a benchmark tell each other is bytes that nobody executes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist

import sparsewire as sw
from sparsewire.tools.bench.step.rank import _merge, gather_texts
from sparsewire.tools.bench.step.stopwatch import Step


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_texts_arrive_as_they_were_sent(group: None) -> None:
    for text in ("one", "two \N{MULTIPLICATION SIGN} 10"):
        assert gather_texts(text) == [text]


def test_samples_arrive_as_they_were_measured(group: None) -> None:
    step = Step({"forward": 0.1, "backward": 1 / 3}, {"select": 0.25}, {"select": 0.125})
    one = {"seconds": step.seconds, **asdict(step), "payload": 1234}
    first, second = _merge([{**one, "wire": 5678}, {**one, "wire": None}])
    assert (first["parts"], first["busy"], first["hidden"]) == (step.parts, step.busy, step.hidden)
    assert (first["seconds"], first["payload"], first["wire"]) == (step.seconds, 1234, 5678)
    assert second["wire"] is None


def test_nothing_is_pickled_between_ranks() -> None:
    pickled = {"gather_object", "all_gather_object", "broadcast_object_list", "send_object_list"}
    for path in sorted(Path(sw.__file__).parent.rglob("*.py")):
        tree = ast.walk(ast.parse(path.read_text()))
        used = {node.attr for node in tree if isinstance(node, ast.Attribute)}
        assert not used & pickled, path
