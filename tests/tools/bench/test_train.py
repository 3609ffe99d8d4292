"""`sparsewire bench train`: what follows from curves, and real races over loopback."""

from __future__ import annotations

import io
import json
import shlex
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sparsewire.tools.bench import kinds
from sparsewire.tools.bench.report import render
from sparsewire.tools.bench.results import Contender, Point, Results, ResultsError, Run, dumps
from sparsewire.tools.bench.timing import Timing
from sparsewire.tools.bench.train import columns, report
from sparsewire.tools.bench.train.columns import Race, Row
from sparsewire.tools.bench.train.plan import LEARNING_RATES, Plan
from sparsewire.tools.bench.train.report import headline, remarks
from sparsewire.tools.cli import main
from sparsewire.tools.cli.worker import tuples
from sparsewire.tools.lab import Link
from tests.tools.tasks import idxfile

from .conftest import bench, setting

LOOPBACK = ["--loopback", "--hosts", "2", "--hidden", "32", "--batch-size", "32"]


def runner(name: str, *scores: float, step: float, failed: str | None = None) -> Contender:
    """One that was looked at every ten steps of so many seconds, and sent a kilobyte in each."""
    points = [Point(0, 0.0, 0.1)]
    for number, score in enumerate(scores, start=1):
        steps = 10 * number
        points.append(Point(steps, steps * step, score, 1000.0 * steps, 1100.0 * steps))
    return Contender(name, points=tuple(points), failed=failed)


@pytest.fixture
def race() -> Race:
    """Dense gets there in fewer steps, TopK sooner, and two never do."""
    return racing(
        runner("dense DDP", 0.95, 0.971, step=2.0),
        runner("TopK(0.01)", 0.9, 0.96, 0.972, step=0.5),
        runner("RandomK(0.01)", 0.3, 0.5, 0.6, step=0.5),
        runner("TopK(0.5)", step=1.0, failed="the loss <was> no longer finite"),
    )


def racing(*runners: Contender, model: str = "mnist", target: float = 0.97) -> Race:
    """A race of these on four hosts."""
    told = {"name": model, "parameters": 38_000_000, "tensors": 8, "examples": 40}
    run = Run(4, "lab", 10**9, (Link(0, 10**9, 0.97e9, 0.98e9),), runners)
    facts = {"target": target, "limit_steps": 30}
    return Race(Results("train", setting(model), told, (run,), facts))


def cells(race: Race, one: Contender) -> dict[str, str]:
    """What the table says of a contender, by column."""
    return {column.key: column.text(Row(race, one)) for column in columns.columns(race)}


def summary(race: Race, one: Contender) -> dict[str, Any]:
    """What results.json says of a contender."""
    return columns.summarize(race.results, race.run, one)


def test_who_got_there_and_when(race: Race) -> None:
    dense, sparse, late, broken = race.run.contenders
    assert [one.name for one in race.arrived] == ["TopK(0.01)", "dense DDP"]
    assert summary(race, sparse)["speed_up"] == pytest.approx(40 / 15)
    assert summary(race, dense)["speed_up"] == 1
    assert summary(race, late)["speed_up"] is None
    assert summary(race, sparse)["examples_per_second"] == pytest.approx(4 * 40 / 0.5)
    assert summary(race, broken)["examples_per_second"] is None
    assert headline(race) == (
        "On 4 hosts at 1 Gbit/s, TopK(0.01) reaches 97 % on MNIST in 15.0 s, "
        "dense DDP in 40.0 s: 2.7× faster."
    )
    said = remarks(race)
    assert "TopK(0.01) needs 10 steps more than dense DDP." in said
    assert any("RandomK(0.01) did not get there in 30 steps" in sentence for sentence in said)
    assert "TopK(0.5) failed: the loss <was> no longer finite" in said


@pytest.mark.parametrize(
    ("step", "ending"),
    [
        (0.6, "dense DDP in 40.0 s: 2.2× faster."),
        (0.7, "dense DDP in 40.0 s: they cannot be told apart in this run."),  # 21 s against 20
        (1.33, "dense DDP in 40.0 s: they cannot be told apart in this run."),
        (1.9, "dense DDP in 40.0 s: they cannot be told apart in this run."),
        (2.1, "dense DDP in 40.0 s: 1.6× slower."),
    ],
)
def test_a_headline_for_every_outcome(race: Race, step: float, ending: str) -> None:
    sparse = runner("TopK(0.01)", 0.9, 0.96, 0.972, step=step)
    one = racing(race.run.contenders[0], sparse)
    assert headline(one).endswith(ending)
    later = "TopK(0.01) gets there later than dense DDP." in remarks(one)
    assert later is ending.endswith("slower.")
    against = cells(one, sparse)["against_dense"]
    assert ending.endswith(f"{against}.") or (against == "unclear" and "told apart" in ending)


def test_a_time_spreads_between_two_looks_and_with_the_time_per_step() -> None:
    even = runner("TopK(0.01)", 0.9, 0.96, 0.972, step=0.5)
    assert even.timing == Timing(15.0, 10.0, 15.0)
    uneven = (Point(0, 0.0, 0.1), Point(10, 10.0, 0.5), Point(20, 11.0, 0.97))
    assert Contender("TopK(0.01)", points=uneven).timing == Timing(11.0, 1.0, 20.0)


def test_schemes_that_get_there_together_share_the_headline(race: Race) -> None:
    dense, sparse, *_ = race.run.contenders
    other = runner("RandomK(0.01)", 0.9, 0.96, 0.972, step=0.6)
    assert headline(racing(dense, sparse, other)).endswith(
        ": 2.7× faster; RandomK(0.01) cannot be told apart from the fastest."
    )


def test_headlines_without_a_winner(race: Race) -> None:
    dense, sparse, late, _ = race.run.contenders
    assert "dense DDP reaches" in headline(racing(dense, late))
    assert headline(racing(late)).endswith("nobody reached 97 % on MNIST in 30 steps.")
    assert headline(racing(sparse)).endswith("in 15.0 s.")
    slow = runner("dense DDP", 0.5, step=1.0)
    assert headline(racing(slow, sparse)).endswith("dense DDP does not.")


def test_json_round_trip(race: Race) -> None:
    content = json.loads(dumps(kinds.as_json(race.results)))
    assert Results.from_dict(content) == race.results
    _, sparse, late, broken = content["runs"][0]["contenders"]
    assert sparse["summary"]["seconds_to_target"] == 15
    assert sparse["summary"]["bytes_to_target"] == 33000
    told = late["summary"]
    assert (told["reached"], told["seconds_to_target"]) == (False, None)
    assert late["summary"]["best_score"] == 0.6
    assert broken["failed"]
    with pytest.raises(ResultsError, match="kind 'race'"):
        Results.from_dict({**content, "kind": "race"})
    with pytest.raises(ResultsError, match="no results"):
        Results.from_dict({"schema": 2, "kind": "train"})


def test_a_plan_survives_json(tmp_path: Path) -> None:
    plan = Plan(
        model="mnist",
        contenders=("dense DDP",),
        target=0.9,
        batch_size=8,
        hidden=(16, 16),
        optimizer="sgd",
        lr=0.1,
        evaluate_every=5,
        limit_steps=50,
        seed=0,
        data=str(tmp_path),
        timeout=60.0,
    )
    assert Plan(**tuples(json.loads(json.dumps(asdict(plan))))) == plan


def test_table_picture_and_page(race: Race, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(columns.table(race))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("To 97 % on MNIST", "15.0 s", "2.7× faster", "never", "> 30", "failed"):
        assert text in shown
    report.save_picture(race.results, tmp_path / "train.png", tmp_path / "train.svg")
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")
    ElementTree.parse(tmp_path / "train.svg")
    text = render(report.page(race.results))
    assert render(report.page(race.results)) == text, "the same from the same"
    assert "2.7× faster" in text
    assert "&lt;was&gt;" in text
    assert "<was>" not in text
    assert text.count("<svg ") == 2, "for wide and for narrow screens"


def test_command_line_knows_the_learning_rates() -> None:
    """It names them itself, so that --help need not import torch."""
    from sparsewire.tools.cli.options.bench import RACE_RATES

    said = ", ".join(f"{rate:g} for {name}" for name, rate in LEARNING_RATES.items())
    assert said == RACE_RATES


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small share of MNIST."""
    return idxfile.write_mnist(tmp_path_factory.mktemp("data"), 2112, 500)


def race_over_loopback(folder: Path, data: Path, *words: str) -> dict[str, Any]:
    ended = bench(folder, *LOOPBACK, "--data", str(data), *words, "--out", "out", command="train")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout
    content: dict[str, Any] = json.loads((folder / "out" / "results.json").read_text())
    assert (folder / "out" / "train.png").exists()
    assert "bench train" in (folder / "out" / "report.html").read_text()
    return {one["name"]: one for one in content["runs"][0]["contenders"]}


def test_a_race(tmp_path: Path, data: Path) -> None:
    words = ["--target", "0.5", "--evaluate-every", "5", "--limit-steps", "80", "--lr", "0.1"]
    found = race_over_loopback(tmp_path, data, *words, "--schemes", "TopK(0.05)")
    assert list(found) == ["dense DDP", "TopK(0.05)"]
    for one in found.values():
        points = one["points"]
        assert one["summary"]["reached"]
        assert [point["step"] for point in points] == list(range(0, 5 * len(points), 5))
        assert points[0]["score"] < 0.5 <= points[-1]["score"]
        assert all(point["score"] < 0.5 for point in points[:-1])
        seconds = [point["seconds"] for point in points]
        assert seconds == sorted(seconds)
        assert one["summary"]["steps_to_target"] == points[-1]["step"]
    dense, sparse = found.values()
    assert dense["points"][0] == sparse["points"][0], "the same weights to begin with"
    parameters = 784 * 32 + 32 + 32 * 10 + 10
    assert dense["points"][1]["payload"] == 5 * 4 * parameters
    assert sparse["points"][1]["payload"] < dense["points"][1]["payload"] / 5


def test_those_who_never_get_there(tmp_path: Path, data: Path) -> None:
    words = ["--target", "0.999", "--evaluate-every", "4", "--limit-steps", "6"]
    found = race_over_loopback(tmp_path, data, *words, "--schemes", "TopK(0.05)")
    for one in found.values():
        assert not one["summary"]["reached"]
        assert one["failed"] is None
        assert [point["step"] for point in one["points"]] == [0, 4, 6]
        assert one["summary"]["seconds_to_target"] is None


def test_those_who_diverge(tmp_path: Path, data: Path) -> None:
    words = ["--lr", "1e30", "--evaluate-every", "4", "--limit-steps", "8"]
    found = race_over_loopback(tmp_path, data, *words, "--schemes", "TopK(0.05)")
    for one in found.values():
        assert "was no longer a finite number" in one["failed"]
        assert "try a smaller --lr" in one["failed"]


def test_a_race_of_gpts(tmp_path: Path) -> None:
    """To a loss, with AdamW; exchanging updates at every step and at every third."""
    scheme = "Scheme(TopK(0.05), values=TwoBit())"
    words = ["--loopback", "--hosts", "2", "--model", "gpt", "--hidden", "32", "--batch-size", "2"]
    words += ["--target", "4.5", "--evaluate-every", "6", "--limit-steps", "60", "--lr", "0.01"]
    words += ["--schemes", f"updates {scheme}", f"updates every 3 {scheme}", "--out", "out"]
    ended = bench(tmp_path, *words, command="train")
    assert ended.returncode == 0, ended.stderr
    assert "To a loss of 4.5 on text" in ended.stdout
    assert "Validation loss over time" in (tmp_path / "out" / "report.html").read_text()
    (run,) = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    found = run["contenders"]
    dense, each, third = found
    for one in found:
        assert one["summary"]["reached"]
        assert one["points"][0]["score"] > 5 > 4.5 >= one["points"][-1]["score"]
        assert one["summary"]["best_score"] == min(point["score"] for point in one["points"])
    assert each["points"][1]["payload"] < dense["points"][1]["payload"] / 5
    assert third["points"][1]["payload"] < each["points"][1]["payload"] / 2.9


def test_a_loss_is_better_below(tmp_path: Path) -> None:
    points = (Point(0, 0.0, 5.5), Point(10, 1.0, 2.0), Point(20, 2.0, 2.1))
    one = Contender("dense DDP", points=points)
    losses = racing(one, model="gpt", target=2.05)
    assert cells(losses, one)["best_score"] == "2.000"
    assert not losses.got_there(one)
    assert losses.got_there(replace(one, points=points[:2]))
    assert "nobody reached a loss of 2.05 on text in 30 steps" in headline(losses)
    report.save_picture(losses.results, tmp_path / "train.png")


WRONG_WORDS = [
    ("--target 1", "--target must be between 0 and 1"),
    ("--target 97", "--target must be between 0 and 1"),
    ("--model gpt --target -1", "--target must be above 0"),
    ("--model gpt --hidden 64 32", "--hidden widths of gpt must be alike"),
    ("--schemes 'updates every 0 TopK(0.01)'", "every is at least 1"),
    ("--hosts 1", "--hosts must be at least 2"),
    ("--rate fast", "--rate: 'fast' is no rate"),
    ("--schemes TopKK(1)", "did you mean TopK?"),
    ("--schemes --peers", "nothing to measure"),
    ("--evaluate-every 0", "--evaluate-every must be"),
    ("--limit-steps 0", "--limit-steps must be"),
    ("--lr 0", "--lr must be a positive number"),
    ("--hidden 0", "--hidden must be at least 1"),
    ("--batch-size 0", "--batch-size must be at least 1"),
    ("--seed -1", "--seed must be in"),
]


@pytest.mark.parametrize(("words", "reason"), WRONG_WORDS, ids=[case[0] for case in WRONG_WORDS])
def test_wrong_words(capsys: pytest.CaptureFixture[str], words: str, reason: str) -> None:
    assert main(["bench", "train", "--hosts", "2", *shlex.split(words)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert reason in shown.err


def test_a_text_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hosts", "2", "--model", "gpt", "--data", "nowhere.txt"]
    assert main(["bench", "train", *words]) == 1
    assert "nowhere.txt is no file" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["bench"], ["bench", "train", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert not ended.value.code
        assert "  sparsewire bench train --rate 100mbit" in capsys.readouterr().out
