"""The benchmarks run: small, for their output and not for their figures."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sparsewire import kernels

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


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("guard")


def test_the_guard_notices_a_kernel_that_takes_twice_as_long(
    guard: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = pytest.importorskip("sparsewire.kernels.cpu")
    kernels.prepare("cpu")
    name = "select TopK(0.01)"
    usual = min(guard.coding()[name] for _ in range(2))
    fast = cpu.top_k

    def slow(*arguments: Any) -> kernels.Selection:
        start = time.process_time()
        selection: kernels.Selection = fast(*arguments)
        end = 2 * time.process_time() - start
        while time.process_time() < end:
            pass
        return selection

    monkeypatch.setattr(cpu, "top_k", slow)
    slowed = guard.measure([guard.coding])
    assert slowed[name] > 1.5 * usual
    assert slowed[name] > guard.BOUNDS[name]


def test_the_guard_measures_again_what_is_above_its_bound(guard: ModuleType) -> None:
    name, bound = next(iter(guard.BOUNDS.items()))
    noise = iter([2 * bound, 0.9 * bound])
    assert guard.measure([lambda: {name: next(noise)}]) == {name: 0.9 * bound}
    runs = iter([4 * bound, 2 * bound, 3 * bound])
    assert guard.measure([lambda: {name: next(runs)}]) == {name: 2 * bound}
    assert next(runs, None) is None


def test_the_guard_fails_if_one_ratio_is_above_its_bound(
    guard: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guard, "measure", lambda: dict(guard.BOUNDS))
    guard.main()
    assert capsys.readouterr().out.count("PASS") == len(guard.BOUNDS)
    slow = guard.BOUNDS | {"decode 8": 2 * guard.BOUNDS["decode 8"]}
    monkeypatch.setattr(guard, "measure", lambda: slow)
    with pytest.raises(SystemExit, match="became slower"):
        guard.main()
    assert "FAIL  decode 8" in capsys.readouterr().out
