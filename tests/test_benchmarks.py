"""The benchmarks run: small, for their output and not for their figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_selector_gets_a_figure(tmp_path: Path) -> None:
    text = run("encode.py", "--sizes", "2e4", "--repeats", "1", "--save", "--out", str(tmp_path))
    content = json.loads((tmp_path / "encode-cpu.json").read_text())
    found = content["copies"]["20000"]
    for name in ("global", "ResNet-18", "transformer"):
        for row in (
            "TopK(0.01)",
            "Threshold(0.01)",
            "RandomK(0.01)",
            "BlockRandomK(0.01)",
            "plain",
        ):
            assert found[f"{row} {name}"] > 0
    assert "whole exchange" in text
    assert (tmp_path / "encode-cpu.png").stat().st_size > 1000
    assert (tmp_path / "encode-cpu.txt").read_text().splitlines()[1:] == text.splitlines()[1:]


@pytest.mark.slow  # compiles nothing, but trains for a few steps
def test_the_wire_is_measured() -> None:
    text = run("wire.py", "--size", "1e5", "--repeats", "1")
    assert text.count("PASS") + text.count("FAIL") == 9
    assert "PASS  indices at 1 %" in text


@pytest.mark.slow  # ResNet-18 goes back and forth
def test_the_stages_of_a_step_are_measured() -> None:
    text = run("table2.py", "--batch", "1", "--repeats", "1", "--rows", "Top-k", "Standard SGD")
    rows = [line.rsplit(maxsplit=6) for line in text.splitlines() if line.endswith("%")]
    assert [row[0] for row in rows] == ["Top-k", "Standard SGD"]
    for row in rows:
        select, encode, decode, whole, share = map(float, row[1:-1])
        assert select >= 0
        assert encode >= 0
        assert decode + whole + share < 1e6  # more cannot be said of one repeat on a busy machine
    assert float(rows[0][1]) > 0
