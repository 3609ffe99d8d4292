"""A study is filled cell by cell, goes on where it stopped, and is shown beside the paper."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sparsewire as sw
from papers import picture, reproduce
from papers.__main__ import main
from papers.recipe import Cell, Place, Recipe, Study, at_their_best
from papers.reproduce import Request, RequestError
from papers.store import SCHEMA, Store, StoreError
from papers.studies import STUDIES, accuracy, aji2017_translation
from papers.table import Board
from papers.tasks import translation
from papers.trainer import Trainer
from sparsewire.tools.tasks.idx import DataError
from tests.papers.tasks import textpairs
from tests.tools.cli.conftest import environment
from tests.tools.tasks import idxfile

ROOT = Path(__file__).parents[2]
RECIPE = Recipe("mnist", 2, 8, 2, "sgd", 0.1, hidden=(16,), looks=2)


def cells() -> list[Cell]:
    return [
        Cell("dense", "Scheme(Dense())", RECIPE, (("dense", "a"), ("dense", "b")), (98.5, None)),
        Cell("top-k/a", "Scheme(TopK(0.1))", RECIPE, (("top-k", "a"),), (97.25,)),
        Cell("top-k/b", "Scheme(TopK(0.2), seed=0)", replace(RECIPE, rate=1e30), (("top-k", "b"),)),
    ]


def remarks(found: Mapping[Place, Sequence[float]]) -> list[str]:
    return [f"{len(found)} places are filled"]


TOY = Study("toy", "toy", "a toy learns", {"short": cells}, {"short": (0, 1)}, remarks)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(STUDIES, "toy", TOY)
    idxfile.write_mnist(tmp_path / "mnist", 100, 40)
    return tmp_path


@pytest.fixture
def ask(folder: Path) -> Callable[..., None]:
    request = Request("toy", device="cpu", data=folder / "mnist", store=folder / "toy.jsonl")
    return lambda **more: reproduce.run(replace(request, **more))


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "toy.jsonl").read_text().splitlines()]


def test_a_study(
    ask: Callable[..., None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(only=("top-k/a", "dense"), seeds=(0,))
    told = capsys.readouterr()
    assert "[2/2] top-k/a, seed 0: Scheme(TopK(0.1))" in told.err
    assert "steps/s" in told.err
    ask()
    assert [(line["cell"], line["seed"]) for line in lines(folder)] == [
        ("dense", 0),
        ("top-k/a", 0),
        ("top-k/b", 0),
        ("dense", 1),
        ("top-k/a", 1),
        ("top-k/b", 1),
    ]
    table = capsys.readouterr().out.splitlines()
    dense = next(line for line in table if line.startswith("dense"))
    finals = [100 * line["test_accuracy"] for line in lines(folder) if line["cell"] == "dense"]
    said = f"{sum(finals) / 2:.2f} ± {abs(finals[0] - finals[1]) / 2:.2f}"
    assert dense.count(said) == 2
    assert any(line.split() == ["paper", "98.50"] for line in table)
    assert any(line.startswith("top-k") and line.endswith("diverged") for line in table)
    assert "4 places are filled" in table
    for ending in ("png", "svg"):
        assert (folder / f"toy.{ending}").stat().st_size > 5000
    before = (folder / "toy.jsonl").read_bytes()
    ask()
    assert (folder / "toy.jsonl").read_bytes() == before


def test_a_result_says_all_that_it_depends_on(ask: Callable[..., None], folder: Path) -> None:
    ask(only=("top-k/a",), seeds=(1,), quiet=True)
    (result,) = lines(folder)
    assert result["study"] == "toy"
    assert result["scheme"] == "Scheme(TopK(0.1))"
    assert result["recipe"] == RECIPE.to_dict()
    assert (result["seed"], result["steps"], result["device"]) == (1, 12, "cpu")
    assert result["sent"] == result["received"] > 0
    assert result["dense"] == 784 * 16 * 4 + (16 + 160 + 10) * 4
    curves = result["curves"]
    assert curves["epoch"] == [0.5, 1, 1.5, 2]
    assert curves["test_accuracy"][-1] == result["test_accuracy"]
    assert curves["loss"][-1] < curves["loss"][0]
    assert {"torch", "python", "sparsewire"} <= set(result["versions"])
    assert result["machine"]["cores"] >= 1
    assert {"commit", "created", "seconds", "steps_per_second"} <= set(result)
    assert result["exchange_share"] is None  # of 12 steps nothing can be told


def test_how_long_the_exchange_takes_is_told(
    ask: Callable[..., None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = replace(cells()[1], recipe=replace(RECIPE, epochs=10))
    STUDIES["toy"] = replace(TOY, recipes={"short": lambda: [longer]})
    ask(seeds=(0,))
    (result,) = lines(folder)
    assert 0 < result["exchange_share"] < 1
    assert f"takes {100 * result['exchange_share']:.0f} % of a step" in capsys.readouterr().err
    ask(seeds=(1,), beside=2)
    assert lines(folder)[1]["exchange_share"] is None


def test_seeds_differ_and_repeat(ask: Callable[..., None], folder: Path) -> None:
    ask(only=("top-k/a",))
    first = [line["curves"]["loss"] for line in lines(folder)]
    (folder / "toy.jsonl").unlink()
    ask(only=("top-k/a",))
    assert [line["curves"]["loss"] for line in lines(folder)] == first
    assert first[0] != first[1]


def test_no_training_begins_that_would_end_too_late(
    ask: Callable[..., None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(minutes=1e-5)  # not even time for one, so the first is tried and no second
    assert "time is up: 5 trainings left" in capsys.readouterr().err
    assert len(lines(folder)) == 1


def test_no_time_at_all_shows_what_there_is(
    ask: Callable[..., None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(minutes=0)
    assert not (folder / "toy.jsonl").exists()
    assert "toy, recipe short: a toy learns" in capsys.readouterr().out


def test_trainings_beside_each_other_find_what_they_find_alone(
    ask: Callable[..., None], folder: Path
) -> None:
    ask()
    alone = {(line["cell"], line["seed"]): line["curves"]["loss"] for line in lines(folder)}
    (folder / "toy.jsonl").unlink()
    ask(beside=4)
    assert all(line["beside"] == 4 for line in lines(folder))
    found = {(line["cell"], line["seed"]): line["curves"]["loss"] for line in lines(folder)}
    assert found == alone


def test_a_result_with_a_wrong_message_is_doubted(
    ask: Callable[..., None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(only=("top-k/a",), seeds=(0,))
    assert "?" not in capsys.readouterr().out
    (line,) = lines(folder)
    (folder / "toy.jsonl").write_text(json.dumps({**line, "flaw": "step 3: it is wrong"}))
    ask(minutes=0)
    table = capsys.readouterr().out.splitlines()
    assert any(
        text.startswith("top-k") and f"{100 * line['test_accuracy']:.2f}?" in text for text in table
    )
    assert "top-k/a: step 3: it is wrong" in table
    assert not any("places are filled" in text for text in table)  # nothing follows from it
    ask(only=("top-k/a",), seeds=(0,))
    assert [found["flaw"] for found in lines(folder)] == ["step 3: it is wrong", None]
    assert "?" not in capsys.readouterr().out


def test_what_is_over_is_let_go(ask: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next training begins: on a GPU two may not fit."""
    made: list[weakref.ref[Trainer]] = []
    alive = []

    class Watched(Trainer):
        def __init__(self, *given: Any) -> None:
            alive.append(sum(other() is not None for other in made))
            super().__init__(*given)
            made.append(weakref.ref(self))

    monkeypatch.setattr(reproduce, "Trainer", Watched)
    ask(quiet=True)
    assert alive == [0] * 6


def test_an_unfinished_training_is_done_again(
    ask: Callable[..., None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(*anything: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("papers.trainer.Trainer._look", stop)
        with pytest.raises(KeyboardInterrupt):
            ask(only=("dense",), seeds=(0,))
    assert not (folder / "toy.jsonl").exists()
    assert "toy.jsonl, and the same command goes on" in capsys.readouterr().err
    ask(only=("dense",), seeds=(0,))
    assert len(lines(folder)) == 1


def test_nothing_is_trained_that_cannot_be_kept_or_has_no_data(
    ask: Callable[..., None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").touch()
    with pytest.raises(StoreError, match=r"results cannot be kept in .*; name another file"):
        ask(store=folder / "file" / "toy.jsonl")
    photos = replace(cells()[0], name="photos", recipe=replace(RECIPE, problem="cifar10"))
    STUDIES["toy"] = replace(TOY, recipes={"short": lambda: [*cells(), photos]})
    with pytest.raises(DataError):
        ask()
    assert "seed 0" not in capsys.readouterr().err
    assert not (folder / "toy.jsonl").exists()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"name": "tow"}, r"no study 'tow': did you mean toy\?"),
        ({"recipe": "quick"}, "toy has no recipe 'quick': there are short"),
        ({"only": ("random",)}, "no cell is called random: there are dense, top-k/a, top-k/b"),
        ({"beside": 0}, "--beside must be at least 1, not 0"),
        ({"minutes": -1}, "--minutes must be at least 0, not -1"),
    ],
)
def test_what_there_is_not(ask: Callable[..., None], more: dict[str, object], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        ask(**more)


def test_translation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for corpus in translation.CORPORA.values():
        textpairs.write(tmp_path / corpus.name, corpus, train=150, test=4)
    request = Request(
        "aji2017-translation",
        recipe="quick",
        only=("dense/*/transformer/plain", "99/local/1-bit/column/multi30k/*"),
        device="cpu",
        data=tmp_path,
        store=tmp_path / "out.jsonl",
    )
    reproduce.run(request)
    told = capsys.readouterr()
    assert "[4/4] 99/local/1-bit/column/multi30k/transformer/layernorm" in told.err
    assert "validation BLEU" in told.err
    table = told.out.splitlines()
    assert any(line.startswith("test BLEU  ") for line in table)
    assert any(line.startswith("test BLEU as sacrebleu counts it: nrefs:1|") for line in table)
    assert "too short to judge the claim: everything runs" in table
    assert (tmp_path / "out-quick.svg").stat().st_size > 5000
    results = Store(tmp_path / "out.jsonl")._results
    assert [result["pairs"] + result["too_long"] for result in results] == [150] * 4
    assert all(result["versions"]["sacrebleu"] for result in results)
    with pytest.raises(RequestError, match="--download fetches CIFAR-10 alone"):
        reproduce.run(replace(request, download=True))


def test_no_two_lines_of_a_picture_look_the_same(tmp_path: Path) -> None:
    store, cells = Store(tmp_path / "many.jsonl"), aji2017_translation.quick()
    for cell in cells:
        curves = {"epoch": [1, 2], "valid_bleu": [None, 3.0], "valid_loss": [2.0, 1.0]}
        store.append(
            {
                "schema": SCHEMA,
                "scheme": cell.scheme,
                "identity": sw.parse(cell.scheme).identity,
                "recipe": cell.recipe.to_dict(),
                "seed": 0,
                "diverged": False,
                "curves": curves,
            }
        )
    drawn = aji2017_translation.TRANSLATION.drawn
    panels = picture.draw("many", Board(cells, store), drawn).axes
    lines = panels[1].get_lines()
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}
    assert len(looks) == len(lines) == len(aji2017_translation.ROWS)
    assert [list(line.get_xdata()) for line in lines] == [[2]] * len(lines)


def test_scores_against_bytes(tmp_path: Path) -> None:
    """Each row at its best among the columns with the most seeds; bad ones on the edge."""
    store, cells = Store(tmp_path / "out.jsonl"), accuracy.GPT.recipes["quick"]()
    losses = {"dense/0.004": [1.5, 1.6], "gradients 1 %/0.004": [2.5], "updates 1 %/0.004": [1.6]}
    for name, scores in losses.items():
        cell = next(cell for cell in cells if cell.name == name)
        for seed, score in enumerate(scores):
            store.append(
                {
                    "schema": SCHEMA,
                    "scheme": cell.scheme,
                    "identity": sw.parse(cell.scheme).identity,
                    "recipe": cell.recipe.to_dict(),
                    "seed": seed,
                    "diverged": False,
                    "valid_loss": score,
                    "sent": 1e6 if "dense" in name else 1e4,
                }
            )
    figure = picture.draw_against_bytes("bytes", Board(cells, store, accuracy.VALID_LOSS))
    (axes,) = figure.axes
    named = {text.get_text() for text in axes.texts}
    assert named == {"dense: 1.550", "updates 1 %: 1.600", "gradients 1 %: 2.500"}
    assert axes.get_xlim()[0] < 1e4 < 1e6 < axes.get_xlim()[1]
    found = {("a", "1"): [1.0], ("a", "2"): [2.0, 4.0], ("a", "3"): [3.0, 2.0], ("b", "1"): [7.0]}
    best = {"a": ("3", [3.0, 2.0]), "b": ("1", [7.0])}
    assert at_their_best(found, accuracy.VALID_LOSS) == best


def start(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the clone, to its end."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_overview(capsys: pytest.CaptureFixture[str]) -> None:
    reproduce.run(Request())
    told = capsys.readouterr().out
    for study in STUDIES.values():
        assert f"{study.name}: {study.claim}" in told
    assert "of 78 trainings done" in told


def test_command_line(tmp_path: Path) -> None:
    folder = str(idxfile.write_mnist(tmp_path / "mnist", 400, 50))
    words = ["aji2017-mnist", "--quick", "--only", "0/plain", "--data", folder]
    ended = start("-m", "papers", *words, "--store", str(tmp_path / "out.jsonl"))
    assert ended.returncode == 0, ended.stderr
    assert "[1/1] 0/plain, seed 0: Scheme(Dense())" in ended.stderr
    assert "0 % dropped" in ended.stdout
    assert (tmp_path / "out-quick.png").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["aji2017"], "did you mean aji2017-mnist or aji2017-translation or"),
        (["aji2017-mnist", "--quick", "--recipe", "paper"], "exclude each other"),
        (["aji2017-mnist", "--minutes", "-1"], "--minutes must be at least 0"),
        (["--device", "tpu"], "--device must be cpu or cuda, not 'tpu'"),
        (
            ["--seed", "1"],
            "unrecognized option --seed; did you mean --seeds? (see `python -m papers --help`)",
        ),
    ],
)
def test_mistakes_on_the_command_line(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("sparsewire: ")
    assert told.count("\n") == 1
    assert reason in told


BARE = """
import runpy, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"rich", "matplotlib"}:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
sys.argv[0] = "papers"
runpy.run_module("papers", run_name="__main__")
"""


def test_torch_alone_is_enough(tmp_path: Path) -> None:
    folder = str(idxfile.write_mnist(tmp_path / "mnist", 400, 50))
    store = tmp_path / "out.jsonl"
    words = [
        "aji2017-mnist",
        "--quick",
        "--only",
        "0/plain",
        "--data",
        folder,
        "--store",
        str(store),
    ]
    ended = start("-c", BARE, *words)
    assert ended.returncode == 0, ended.stderr
    assert "0 % dropped" in ended.stdout
    assert "no picture: matplotlib is not installed" in ended.stderr
    assert len(Store(store)._results) == 1
