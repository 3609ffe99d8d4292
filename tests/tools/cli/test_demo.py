"""The demo: a lab where one can be built, loopback and a reason where not."""

from __future__ import annotations

import pytest

from sparsewire.tools.cli import demo as home
from sparsewire.tools.cli.options import BenchTrain, Demo


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[BenchTrain]:
    """What the demo would train, without training it."""
    taken: list[BenchTrain] = []

    def train(options: BenchTrain, command: str) -> int:
        assert command == "sparsewire demo", "which the report names"
        taken.append(options)
        return 0

    monkeypatch.setattr(home, "train", train)
    return taken


def test_slow_links_where_they_can_be_had(
    asked: list[BenchTrain], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(home, "obstacle", lambda: None)
    assert home.demo(Demo()) == 0
    assert (asked[0].loopback, asked[0].rate) == (False, "1gbit")
    assert "dense" in asked[0].peers
    assert "1 Gbit/s" in capsys.readouterr().err


def test_loopback_and_the_reason_elsewhere(
    asked: list[BenchTrain], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(home, "obstacle", lambda: "a lab needs root")
    assert home.demo(Demo()) == 0
    assert asked[0].loopback
    assert "a lab needs root" in capsys.readouterr().err


def test_a_gpt_with_adamw(
    asked: list[BenchTrain], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(home, "obstacle", lambda: None)
    assert home.demo(Demo(model="gpt")) == 0
    assert (asked[0].model, asked[0].rate) == ("gpt", "100mbit")
    assert "AdamW on 4 hosts with links of 100 Mbit/s" in capsys.readouterr().err


def test_quiet(asked: list[BenchTrain], capsys: pytest.CaptureFixture[str]) -> None:
    assert home.demo(Demo(quiet=True)) == 0
    assert asked[0].quiet
    assert capsys.readouterr().err == ""
