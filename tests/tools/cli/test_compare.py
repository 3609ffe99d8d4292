"""The table of a comparison, without a training."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sparsewire.tools.bench.compare import table
from sparsewire.tools.cli.recorder import Result


def result(scheme: str, low: float, median: float, high: float) -> Result:
    """A training on one worker whose steps took so many seconds."""
    summary = {
        "scheme": scheme,
        "workers": 1,
        "test_accuracy": 0.95,
        "bytes_per_step": 1000.0,
        "reduction": 4.0,
        "step_seconds": median,
        "step_quartiles": [low, high],
    }
    return Result(summary, [])


@pytest.mark.parametrize(
    ("low", "median", "high", "verdict"),
    [(0.5, 0.6, 0.7, "1.7× faster"), (0.6, 0.8, 1.0, "unclear"), (1.9, 2.0, 2.1, "2.0× slower")],
)
def test_a_step_is_faster_only_beyond_the_spread(
    low: float, median: float, high: float, verdict: str
) -> None:
    first = result("Dense()", 0.9, 1.0, 1.1)
    found = [first, result("Scheme(TopK(0.01), values=TwoBit())", low, median, high)]
    console = Console(width=80, file=io.StringIO())
    console.print(table(found, None))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].strip() == "MNIST, 1 worker"
    assert sum(verdict in line for line in lines) == 1
    assert not any("…" in line for line in lines), "it fits a narrow terminal"
