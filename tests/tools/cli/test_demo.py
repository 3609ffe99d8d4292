"""The demo: a lab where one can be built, loopback and a reason where not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from sparsewire.tools.bench.results import Contender, Point, Results, Run
from sparsewire.tools.bench.train.columns import Race
from sparsewire.tools.cli import demo as home
from sparsewire.tools.cli.options import BenchTrain, Demo
from tests.tools.bench.conftest import setting


def runner(name: str, *scores: float, step: float, sent: float) -> Contender:
    """One that was looked at every ten steps of so many seconds and bytes."""
    points = [Point(0, 0.0, 0.1)]
    for number, score in enumerate(scores, start=1):
        steps = 10 * number
        points.append(Point(steps, steps * step, score, sent * steps, sent * steps))
    return Contender(name, points=tuple(points))


DENSE = runner("dense DDP", 0.95, 0.971, step=2.0, sent=1e7)
SPARSE = runner("TopK(0.01)", 0.9, 0.96, 0.972, step=0.5, sent=1e5)


def race(*runners: Contender, rate: int | None) -> Race:
    """What a demo comes to, on a lab with a rate or else over loopback."""
    model = {"name": "mnist", "parameters": 38_000_000, "tensors": 8, "examples": 40}
    run = Run(4, "lab" if rate else "loopback", rate, (), runners)
    facts = {"target": 0.97, "limit_steps": 30}
    return Race(Results("train", setting("mnist"), model, (run,), facts))


RACE = race(DENSE, SPARSE, rate=10**9)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[BenchTrain]:
    """What the demo would train, without training it."""
    taken: list[BenchTrain] = []

    def run(options: BenchTrain, command: str) -> Results:
        assert command == "sparsewire demo", "which the report names"
        taken.append(options)
        return RACE.results

    def tell(results: Results, options: BenchTrain, told: Sequence[object]) -> None:
        assert results is RACE.results
        print(*told[1:], sep="\n")

    monkeypatch.setattr(home, "run", run)
    monkeypatch.setattr(home, "tell", tell)
    return taken


def test_slow_links_where_they_can_be_had(
    asked: list[BenchTrain], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(home, "obstacle", lambda: None)
    assert home.demo(Demo(out=Path("here"))) == 0
    assert (asked[0].loopback, asked[0].rate) == (False, "1gbit")
    assert "dense" in asked[0].peers
    shown = capsys.readouterr()
    assert "1 Gbit/s" in shown.err
    assert "about 2 minutes" in shown.err
    assert shown.out.splitlines() == [
        "On 4 hosts at 1 Gbit/s, TopK(0.01) reaches 97 % on MNIST in 15.0 s, "
        "dense DDP in 40.0 s: 2.7× faster.",
        "picture: here/train.png",
        "report: here/report.html",
        'next: sparsewire explain "TopK(0.01)" --params 11e6 --workers 8',
    ]


def test_the_next_command_can_be_copied(
    asked: list[BenchTrain], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make demo` starts the program by a path that is not on PATH."""
    monkeypatch.setattr(home, "obstacle", lambda: None)
    monkeypatch.setattr("sys.argv", [".venv/bin/sparsewire", "demo"])
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert home.demo(Demo(out=Path("here"))) == 0
    assert "next: .venv/bin/sparsewire explain" in capsys.readouterr().out


def test_loopback_and_the_reason_elsewhere(
    asked: list[BenchTrain], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(home, "obstacle", lambda: "a lab needs root")
    assert home.demo(Demo()) == 0
    assert asked[0].loopback
    assert "a lab needs root" in capsys.readouterr().err


def test_over_loopback_the_end_is_about_bytes() -> None:
    assert home.conclusion(race(DENSE, SPARSE, rate=None)) == (
        "To 97 % on MNIST, TopK(0.01) sends 3.0 MB and dense DDP 200.0 MB: 67× less."
    )
    assert home.conclusion(race(SPARSE, rate=None)) == (
        "On 4 hosts over loopback, TopK(0.01) reaches 97 % on MNIST in 15.0 s."
    )


def test_a_gpt_with_adamw(
    asked: list[BenchTrain], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(home, "obstacle", lambda: None)
    assert home.demo(Demo(model="gpt")) == 0
    assert (asked[0].model, asked[0].rate) == ("gpt", "100mbit")
    shown = capsys.readouterr().err
    assert "a small GPT with AdamW" in shown
    assert "4 hosts with links of 100 Mbit/s" in shown


def test_quiet(asked: list[BenchTrain], capsys: pytest.CaptureFixture[str]) -> None:
    assert home.demo(Demo(quiet=True)) == 0
    assert asked[0].quiet
    assert capsys.readouterr().err == ""
