"""The text of the small language model: found, numbered, cut into windows."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

import sparsewire as sw
from papers.problems import Characters, Shelf
from papers.recipe import Recipe
from papers.replicas import Replicas
from papers.tasks import language
from sparsewire.tools.tasks.idx import DataError

TEXT = "to be, or not to be: that is the question.\n" * 60
CPU = torch.device("cpu")
RECIPE = Recipe(
    "shakespeare",
    2,
    4,
    1,
    "adamw",
    1e-2,
    precision="float32",
    hidden=(32, 32),
    model="gpt",
    length=16,
    warmup=2,
    cosine=True,
    communicate="updates",
    step_ahead="auto",
)


def write(folder: Path, packed: bool = False) -> Path:
    """A small text where the large one would lie."""
    if packed:
        (folder / f"{language.TEXT}.gz").write_bytes(gzip.compress(TEXT.encode()))
    else:
        (folder / language.TEXT).write_text(TEXT)
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_text_is_found_and_numbered(tmp_path: Path, packed: bool) -> None:
    data = language.load(language.find(write(tmp_path, packed)))
    found = sorted(set(TEXT))
    whole = torch.cat([data.train, data.val]).tolist()
    assert "".join(found[number] for number in whole) == TEXT
    assert data.characters == len(found)
    assert len(data.train) == int(0.9 * len(TEXT))


def test_what_is_missing_or_damaged_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tinyshakespeare.txt is not in .*--data"):
        language.find(tmp_path)
    broken = tmp_path / f"{language.TEXT}.gz"
    broken.write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot be read"):
        language.load(broken)


def test_the_small_gpt_learns(tmp_path: Path) -> None:
    problem = Shelf(write(tmp_path), CPU).get(RECIPE)
    assert isinstance(problem, Characters)
    training = Replicas(RECIPE, sw.parse("TopK(0.05)"), problem, 0, CPU)
    before = problem.look(training.model, 0)["valid_loss"]
    last = training.run(lambda look: None).looks[-1]
    assert before == pytest.approx(torch.tensor(problem.facts()["characters"]).log(), abs=0.1)
    assert last.found["valid_loss"] < before - 0.3
