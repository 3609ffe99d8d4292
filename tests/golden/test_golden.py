"""Numbers that must not change: means, memories, messages and checkpoints of every kind of scheme.

A change here changes what users compute. If that is meant, write the corpus anew with

    pytest tests/golden --regenerate-golden

and say in the changelog what changed and why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ..cluster import Cluster
from .record import buckets, messages, trajectory
from .schemes import SCHEMES

CORPUS = Path(__file__).parent / "corpus"
DDP_SCHEMES = {
    "top_k": None,
    "random_k_shared": None,
    "union_top_k": None,
    "top_k_global": None,
    "two_bit": 2,
    "sharded": None,
    "random_k_chunks": 2,
}  # name -> ranks of a machine


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Any:
    """Compares a record with the corpus, or writes it there."""

    def check(name: str, part: str, record: Any) -> None:
        path = CORPUS / f"{name}.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        record = json.loads(json.dumps(record))
        if request.config.getoption("--regenerate-golden"):
            path.write_text(json.dumps({**kept, part: record}, indent=1, sort_keys=True) + "\n")
            return
        assert record == kept.get(part), (
            f"{name}: its {part} are not those of the corpus; see the head of {Path(__file__).name}"
        )

    return check


@pytest.mark.parametrize("name", SCHEMES)
def test_trajectories(golden: Any, name: str) -> None:
    golden(name, "trajectory", trajectory(SCHEMES[name]))


@pytest.mark.parametrize("name", SCHEMES)
def test_messages(golden: Any, two: Cluster, name: str) -> None:
    golden(name, "messages", two.run(messages, SCHEMES[name]))


@pytest.mark.parametrize("name", DDP_SCHEMES)
def test_buckets(golden: Any, four: Cluster, name: str) -> None:
    golden(name, "buckets", four.run(buckets, SCHEMES[name], DDP_SCHEMES[name]))


def test_the_corpus_has_no_stale_files() -> None:
    assert {path.stem for path in CORPUS.glob("*.json")} == set(SCHEMES)
