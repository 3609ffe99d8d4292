"""How far a run is: nothing if quiet, lines in logs, a bar on a terminal."""

from __future__ import annotations

import sys

import pytest

from sparsewire.tools.cli.progress import Progress


def run(shown: Progress) -> None:
    with shown:
        shown.begin("TopK[0.01]", total=2)
        shown.update(1, "3 ms/step")
        shown.log("  round 1")
        shown.begin("next", total=4)
        shown.update(2, "5 ms/step", title="another", total=8)
        shown.keep("it failed", "yellow")


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    run(Progress(quiet=True))
    assert capsys.readouterr() == ("", "")


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    run(Progress())
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "TopK[0.01]",
        "  round 1",
        "next",
        "  it failed",
    ]


def test_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    run(Progress())
    shown = capsys.readouterr().err
    assert "it failed" in shown
    assert "another" in shown
    assert "5 ms/step" in shown
    assert "round 1" not in shown, "the bar has said it"
