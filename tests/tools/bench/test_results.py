"""What follows from samples, and that JSON, tables and pictures all say it."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import sparsewire as sw
from sparsewire.tools.bench import contenders, kinds
from sparsewire.tools.bench.results import Results, ResultsError, dumps
from sparsewire.tools.bench.scale.view import Scale
from sparsewire.tools.bench.setting import Setting
from sparsewire.tools.bench.step import columns, report
from sparsewire.tools.bench.step.rank import Plan, interleave
from sparsewire.tools.bench.step.report import headlines, remarks
from sparsewire.tools.bench.step.stopwatch import PARTS
from sparsewire.tools.bench.table import Column
from sparsewire.tools.bench.train import columns as training
from sparsewire.tools.bench.train.columns import Race
from sparsewire.tools.bench.train.plan import GOALS
from sparsewire.tools.cli.worker import tuples

from .conftest import contender, results, run


def test_every_round_has_everybody_and_every_other_goes_backwards() -> None:
    turns = interleave(["a", "b", "c"], 3)
    assert [name for number, name in turns if number == 0] == ["a", "b", "c"]
    assert [name for number, name in turns if number == 1] == ["c", "b", "a"]
    assert [name for number, name in turns if number == 2] == ["a", "b", "c"]
    assert [number for number, _ in turns] == sorted(number for number, _ in turns)


def test_a_plan_survives_json() -> None:
    plan = Plan("mnist", None, interleave(["a", "b"], 2), 5, 60.0, {"a": 3})
    assert Plan(**tuples(json.loads(json.dumps(asdict(plan))))) == plan


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("dense", "dense DDP"),
        (" Dense DDP ", "dense DDP"),
        ("BF16", "bf16 hook"),
        ("powersgd-4", "PowerSGD rank 4"),
    ],
)
def test_names_of_peers(typed: str, name: str) -> None:
    assert contenders.peer(typed) == name
    assert contenders.kind(name) == "peer"


def test_what_exchanges_nothing_is_a_floor() -> None:
    assert contenders.kind("compute alone") == contenders.kind("DDP, no exchange") == "floor"


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("TopK(ratio=0.01)", "TopK(0.01)"),
        ("Scheme(TopK(0.01))", "TopK(0.01)"),
        ("Scheme(TopK(0.01),values=TwoBit())", "Scheme(TopK(0.01), values=TwoBit())"),
    ],
)
def test_names_of_schemes(typed: str, name: str) -> None:
    assert contenders.scheme(typed) == name
    assert contenders.scheme(name) == name
    assert sw.parse(name) == sw.parse(typed)
    assert contenders.kind(name) == "scheme"


def test_names_of_schemes_for_updates() -> None:
    assert contenders.scheme("updates  TopK(ratio=0.01)") == "updates TopK(0.01)"
    assert contenders.scheme("updates TopK(0.01)") == "updates TopK(0.01)"
    assert contenders.kind("updates TopK(0.01)") == "scheme"


def test_an_unknown_peer() -> None:
    with pytest.raises(sw.errors.SchemeError, match="did you mean powersgd-1"):
        contenders.peer("powersgd1")


def test_command_line_knows_the_peers() -> None:
    """It names them itself, so that --help need not import torch."""
    from sparsewire.tools.cli.options.bench import PEERS

    assert set(PEERS) <= set(contenders.SHORT)


def test_median_quartiles_and_parts() -> None:
    one = contender("TopK(0.01)", 1.0, 2.0, 3.0, 4.0, 90.0)
    assert one.median == 3.0
    assert (one.timing.low, one.timing.high) == (2.0, 4.0)
    assert sum(one.parts.values()) == pytest.approx(one.median)
    assert one.parts["exchange"] == pytest.approx(1.5)
    assert one.hidden == pytest.approx(0.5)
    assert one.sent == 1100.0


def test_results_survive_json(measured: Results, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(dumps(kinds.as_json(measured)))
    again = Results.read(path)
    assert kinds.as_json(again) == json.loads(path.read_text())
    assert headlines(again) == headlines(measured)
    assert again.runs[0].dense is not None
    assert again.runs[0].dense.median == measured.runs[0].dense.median  # type: ignore[union-attr]
    summary = json.loads(path.read_text())["runs"][0]["contenders"][-1]["summary"]
    assert summary["times_dense"] == pytest.approx(0.69 / 2.26, abs=1e-6)
    assert summary["examples_per_second"] == pytest.approx(2 * 16 / 0.69, abs=1e-6)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"schema": 9, "kind": "step"}', '{"schema": 3, "kind": "stop"}']
)
def test_what_is_no_results(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(ResultsError):
        Results.read(path)


HOME = Path(__file__).parents[3] / "benchmarks" / "results"
ON_FILE = sorted(HOME.glob("*/results.json"))


@pytest.mark.parametrize("path", ON_FILE, ids=[path.parent.name for path in ON_FILE])
def test_results_on_file_can_be_read(path: Path) -> None:
    """Whatever their schema, what was written beside the samples follows from them still."""
    fields, found = json.loads(path.read_text()), Results.read(path)
    written = kinds.as_json(found)
    assert Results.from_dict(written) == Results.from_dict(json.loads(json.dumps(written)))
    assert (written["schema"], written["kind"]) == (3, fields["kind"])
    before = [*_contenders(fields)]
    after = [*_contenders(written)]
    assert [one["name"] for one in before] == [one["name"] for one in after]
    for old, new in zip(before, after, strict=True):
        for key, value in old.get("summary", {}).items():
            expected = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            if key not in ("quartiles", "parts"):
                assert new["summary"][key] == expected, (old["name"], key)
    assert written.get("crossovers") == fields.get("crossovers")
    if found.kind == "train":
        assert [one.name for one in Race(found).arrived]
    if found.kind == "scale":
        assert Scale(found).mean_error < 0.2


def _contenders(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All contenders of a results.json of any schema."""
    for size in fields.get("sizes", [fields]):
        for network in size.get("runs", [size]):
            yield from network["contenders"]


def test_every_part_of_a_step_has_a_column() -> None:
    assert tuple(column.key for column in columns.PARTS) == PARTS


PAGE = Path(__file__).parents[3] / "docs" / "benchmarks.md"
SCORE = training.best_score(GOALS["mnist"])


@pytest.mark.parametrize("family", [columns.COSTS, columns.PARTS, (*training.COLUMNS, SCORE)])
def test_the_page_explains_every_column(family: tuple[Column[Any], ...]) -> None:
    lines = ["| heading | key | unit in `results.json` | |", "| --- | --- | --- | --- |"]
    for column in family:
        title = column.title.replace("\n", " ")
        lines.append(f"| {title} | `{column.key}` | {column.unit} | {column.about} |")
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8")


def test_headlines(measured: Results) -> None:
    slow, fast = headlines(measured)
    assert slow == (
        "On 2 hosts at 1 Gbit/s, a step takes 0.69 s with TopK(0.01), 2.26 s with dense DDP: "
        "3.3× faster."
    )
    assert fast == (
        "On 2 hosts over unshaped links, a step takes 400 ms with TopK(0.01), 300 ms with dense "
        "DDP: 1.3× slower."
    )


def test_no_winner_among_those_whose_spreads_overlap() -> None:
    floor, noisy = contender("compute alone", 1.0), contender("TopK(0.01)", 1.5, 1.9, 2.4)
    dense, other = contender("dense DDP", 2.0, 2.1, 2.2), contender("RandomK(0.01)", 1.8, 2.1)
    (headline,) = headlines(results(run(floor, dense, other, noisy)))
    assert headline.endswith("with dense DDP: they cannot be told apart in this run.")
    slow = contender("dense DDP", 9.0, 9.5, 9.9)
    (headline,) = headlines(results(run(floor, slow, other, noisy)))
    assert headline.endswith(": 5.0× faster; RandomK(0.01) cannot be told apart from the fastest.")
    (headline,) = headlines(results(run(floor, other, noisy)))
    assert headline.endswith(
        "with TopK(0.01), 1.90× compute alone; RandomK(0.01) cannot be told apart from the fastest."
    )


def test_bars_say_what_the_headline_says() -> None:
    noisy, dense = contender("TopK(0.01)", 1.5, 1.9, 2.4), contender("dense DDP", 2.0, 2.1, 2.2)
    floors = contender("compute alone", 1.0), contender("DDP, no exchange", 1.1)
    measured = run(*floors, dense, noisy)
    assert [measured.against_dense(one) for one in measured.finished] == ["", "", "", "unclear"]
    assert [bar.verdict for bar in report.bars(measured).bars] == ["", "", "", "unclear"]


def test_remarks_claim_no_more_than_the_spread_allows() -> None:
    floor, sparse = contender("compute alone", 0.5), contender("TopK(0.01)", 1.9, 2.0, 2.1)
    close, far = contender("fp16 hook", 1.8, 1.95, 2.0), contender("bf16 hook", 2.6, 2.7)
    noisy, idle = contender("dense DDP", 1.0, 1.9, 3.0), contender("DDP, no exchange", 0.6)
    assert remarks(run(floor, noisy, close, far, idle, sparse)) == [
        "fp16 hook cannot be told apart from TopK(0.01): 1.95 s against 2.00 s.",
        "Compute alone takes 500 ms; TopK(0.01) takes 4.00 times that.",
    ]


def test_remarks_speak_against_us_too(measured: Results) -> None:
    slow, fast = (remarks(run) for run in measured.runs)
    assert slow[0] == "PowerSGD rank 1 is faster than TopK(0.01): 500 ms against 690 ms."
    assert any("bf16 hook failed: the backend <gloo>" in sentence for sentence in slow)
    assert "Slower than dense DDP: TopK(0.01)." in fast


def test_tables_fit_a_narrow_terminal(measured: Results) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    for table in columns.tables(measured, measured.runs[0]):
        console.print(table)
    shown = console.export_text()
    assert "PowerSGD rank 1" in shown
    assert "2,260" in shown
    assert "update" in shown
    assert "…" not in shown


def test_picture(measured: Results, tmp_path: Path) -> None:
    png, svg = tmp_path / "step.png", tmp_path / "step.svg"
    report.save_picture(measured, png, svg)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.stat().st_size > 10_000
    first = svg.read_bytes()
    assert ElementTree.fromstring(first).tag.endswith("svg")
    report.save_picture(measured, svg)
    assert svg.read_bytes() == first, "the same results give the same file"


def test_the_commit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMIT", "c0ffee")
    setting = Setting.here({"rounds": 3})
    assert setting.commit == "c0ffee"
    assert setting.machine["cores"] >= 1
    assert setting.versions["torch"]
