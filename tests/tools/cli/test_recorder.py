"""Records of a run are for whoever made it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparsewire.tools.cli.recorder import Recorder


@pytest.fixture
def open_umask() -> object:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("append", [False, True])
def test_a_new_metrics_file_is_private(tmp_path: Path, open_umask: None, append: bool) -> None:
    path = tmp_path / "runs" / "metrics.jsonl"
    for _ in range(2):
        with Recorder(path, append, quiet=True) as record:
            record({"record": "step"})
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_text().splitlines()) == (2 if append else 1)
