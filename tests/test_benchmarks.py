"""The benchmarks run: small, for their output and not for their figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_scheme_gets_a_figure() -> None:
    script = ROOT / "benchmarks" / "exchange.py"
    done = subprocess.run(
        [sys.executable, str(script), "--size", "2e4", "--repeats", "1"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {line[:42].strip(): float(line[42:]) for line in done.stdout.splitlines()[2:]}
    assert rows["copy"] == 1.0
    assert {"Dense()", "TopK(0.01)", "RandomK(0.01)", "plain topk"} <= rows.keys()
