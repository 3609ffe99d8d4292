"""Text for the small GPT: found, read, cut into windows, and learned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparsewire.tools.tasks import text
from sparsewire.tools.tasks.idx import DataError


def test_pythons_own_source_is_always_there() -> None:
    data = text.load(text.find())
    assert len(data.train) > 8 * len(data.val) > 0
    assert text.load(text.find()).train.equal(data.train)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_bytes(bytes(range(256)) * 400)
    data = text.load(text.find(path))
    assert (len(data.train), len(data.val)) == (102400 - 2 * 4096, 2 * 4096)
    assert data.train[:256].tolist() == list(range(256))
    with pytest.raises(DataError, match="no file: name a file of text"):
        text.find(tmp_path)
    path.write_text("short")
    with pytest.raises(DataError, match="has 5 bytes, and 40,960 are the least"):
        text.load(path)


def test_windows_lie_side_by_side() -> None:
    starts = text.order(3, 1, 200, 16)
    assert len(starts) == text.windows(200, 16)
    apart = starts.sort().values.diff()
    assert (apart == 16).all()
    inputs, labels = text.cut(torch.arange(200), starts, 16)
    assert torch.equal(labels, inputs + 1)
    assert not torch.equal(starts, text.order(3, 2, 200, 16))
