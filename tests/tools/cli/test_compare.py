"""The table of a comparison, without a training."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from sparsewire.tools.bench.compare import Result, table
from sparsewire.tools.cli import compare as command
from sparsewire.tools.cli.errors import CommandError
from sparsewire.tools.cli.options import Compare
from sparsewire.tools.cli.plan import Plan
from sparsewire.tools.cli.recorder import Recorder


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


def test_what_is_finished_is_kept_if_a_later_scheme_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(plans: Sequence[Plan], options: Compare, record: Recorder) -> None:
        assert len(plans) == 2
        record({"record": "run"})
        record({"record": "summary", "scheme": plans[0].scheme, "stopped": False})
        raise CommandError("the loss is not finite", 1)

    saved: list[str] = []
    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(
        command, "_save", lambda _, results: saved.extend(result.name for result in results)
    )
    options = Compare(task="mnist", schemes=("Dense()", "TopK(0.01)"), out=tmp_path, quiet=True)
    with pytest.raises(CommandError, match=r"^the loss is not finite \(finished 1 of 2 schemes\)$"):
        command.compare(options)
    assert saved == ["Dense()"]
