"""Results stay on file, count for what they were trained for, and survive a cut-off line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import sparsewire as sw
from papers import store as store_module
from papers.recipe import Cell, Recipe
from papers.store import SCHEMA, Store, StoreError, usual_path, usual_store
from papers.studies import aji2017

RECIPE = Recipe("mnist", 2, 8, 1, "sgd", 0.1, hidden=(8,), drops=(1, 2))
CELL = Cell("a/b", "Scheme(TopK(0.01))", RECIPE, (("row", "column"),))


def result(seed: int, accuracy: float) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "cell": CELL.name,
        "scheme": CELL.scheme,
        "identity": sw.parse(CELL.scheme).identity,
        "recipe": RECIPE.to_dict(),
        "seed": seed,
        "test_accuracy": accuracy,
    }


def test_what_is_appended_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    store = Store(path)
    assert store.find(CELL, 0) is None
    store.append(result(1, 0.5))
    store.append(result(0, 0.123456789))
    store.append(result(1, 0.75))
    for seen in (store, Store(path)):
        assert [r["test_accuracy"] for r in seen.find_all(CELL)] == [0.123457, 0.75]
        assert seen.count_done([CELL], [0, 1, 2]) == 2
    assert len(path.read_text().splitlines()) == 3


def test_what_another_study_has_trained_counts_too(tmp_path: Path) -> None:
    own, other = tmp_path / "own.jsonl", tmp_path / "other.jsonl"
    Store(other).append(result(0, 0.5))
    Store(other).append(result(1, 0.6))
    store = Store(own, [other])
    store.append(result(1, 0.7))
    for seen in (store, Store(own, [other])):
        assert [r["test_accuracy"] for r in seen.find_all(CELL)] == [0.5, 0.7]  # its own first
    assert len(own.read_text().splitlines()) == 1


def test_studies_of_one_paper_share_what_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "usual_path", lambda _, study: tmp_path / f"{study}.jsonl")
    usual_store("paper", "one").append(result(0, 0.5))
    assert usual_store("paper", "other").is_done(CELL, 0)
    assert Store(tmp_path / "other.jsonl").find(CELL, 0) is None


def test_another_scheme_or_recipe_is_another_training(tmp_path: Path) -> None:
    store = Store(tmp_path / "results.jsonl")
    store.append(result(0, 0.5))
    assert store.find(replace(CELL, name="renamed"), 0) is not None
    assert store.find(replace(CELL, scheme="Scheme(TopK(0.02))"), 0) is None
    assert store.find(replace(CELL, recipe=replace(RECIPE, epochs=2)), 0) is None


def test_results_from_before_a_recipe_said_more_still_count() -> None:
    """The fields that came later are not in a recipe that does without them."""
    assert list(RECIPE.to_dict())[-2:] == ["normalised", "limit"]
    later = replace(RECIPE, model="rnn", vocabulary=10, length=5, drops=(), warmup=3)
    assert list(later.to_dict())[-4:] == ["model", "vocabulary", "length", "warmup"]
    kept = Store(usual_path("aji2017", "aji2017-mnist"))
    assert kept.count_done(aji2017.short(), (0, 1, 2)) >= 60


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Store(path).append(result(0, 0.5))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    store = Store(path)
    assert store.count_done([CELL], [0]) == 1
    store.append(result(1, 0.6))
    assert [r["seed"] for r in Store(path).find_all(CELL)] == [0, 1]


@pytest.mark.parametrize("changed", [{"seed": "a"}, {"identity": None}, {"recipe": 3}])
def test_lines_that_say_nothing_are_left_out(tmp_path: Path, changed: dict[str, object]) -> None:
    path = tmp_path / "results.jsonl"
    Store(path).append(result(0, 0.5))
    with path.open("a") as stream:
        stream.write(json.dumps({**result(1, 0.5), **changed}) + "\n")
        stream.write(json.dumps({"schema": SCHEMA}) + "\n")
    assert [r["seed"] for r in Store(path).find_all(CELL)] == [0]


def test_numbers_that_are_not_finite_become_nothing(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Store(path).append({**result(0, 0.5), "loss": [float("nan"), float("inf"), 1.0]})
    found = Store(path).find(CELL, 0)
    assert found is not None
    assert found["loss"] == [None, None, 1.0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [("something else\n", "holds no results"), ('{"schema": 99}\n', "line 1 .* has schema 99")],
)
def test_other_files_are_refused(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(content)
    with pytest.raises(StoreError, match=reason):
        Store(path)


def test_a_folder_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is a folder: name a file in it"):
        Store(tmp_path)


def test_results_are_found_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert usual_path("aji2017", "aji2017-mnist").is_file()
