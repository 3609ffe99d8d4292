"""Trainings in real processes: their records, their end, and every way to cut them short."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sparsewire.tools.lab import obstacle

from ...patience import wait_for
from .conftest import QUICK, Starter, alive, environment, read, run, sentence

EPOCHS = 8
STEPS = EPOCHS * 33
ENDLESS = ["--epochs", "10000"]


@dataclass
class Finished:
    """A training that ran to its end."""

    summary: dict[str, Any]
    records: list[dict[str, Any]]
    error_output: str


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """What the interrupted and the torchrun trainings are compared with."""
    metrics = tmp_path_factory.mktemp("finished") / "metrics.jsonl"
    words = ["train", "mnist", *QUICK, "--data", str(data), "--epochs", str(EPOCHS), "--json"]
    ended = run(*words, "--metrics", str(metrics))
    assert ended.returncode == 0, ended.stderr
    return Finished(json.loads(ended.stdout), read(metrics), ended.stderr)


def test_records(finished: Finished) -> None:
    kinds = [record["record"] for record in finished.records]
    assert kinds[0] == "run"
    assert kinds[-1] == "summary"
    assert kinds.count("epoch") == EPOCHS
    assert kinds.count("step") == STEPS // 10
    opening, summary = finished.records[0], finished.records[-1]
    assert opening["schema"] == 1
    assert opening["scheme"] == "Scheme(TopK(0.05))"
    assert opening["config"]["batch_size"] == 32
    assert set(opening["versions"]) >= {"sparsewire", "torch", "python"}
    assert summary == finished.summary


def test_it_learns_and_sends_less(finished: Finished) -> None:
    epochs = [record for record in finished.records if record["record"] == "epoch"]
    assert epochs[-1]["loss"] < epochs[0]["loss"] / 2
    assert finished.summary["test_accuracy"] > 0.8
    assert finished.summary["step"] == finished.summary["steps"] == STEPS
    assert not finished.summary["stopped"]
    reduction = finished.summary["dense_bytes_per_step"] / finished.summary["bytes_per_step"]
    assert finished.summary["reduction"] == pytest.approx(reduction)
    assert reduction > 5


def test_plain_lines_where_there_is_no_terminal(finished: Finished) -> None:
    lines = finished.error_output.splitlines()
    assert lines[0] == "TopK(0.05), 2 workers"
    assert len(lines) == 1 + EPOCHS
    assert lines[1].startswith(f"  epoch 1/{EPOCHS}  loss ")
    assert "less than dense" in lines[1]


def test_ctrl_c_then_resume_equals_never_having_stopped(
    start: Starter, tmp_path: Path, finished: Finished
) -> None:
    saved = tmp_path / "saved"
    words = ["--epochs", str(EPOCHS), "--checkpoint", str(saved), "--json"]
    running = start(*words)
    running.wait_for_step(10)
    running.process.send_signal(signal.SIGINT)
    ended = running.end()
    assert ended.returncode == 130, ended.stderr
    stopped = json.loads(ended.stdout)
    assert stopped["stopped"]
    assert 10 < stopped["step"] < STEPS
    assert f"stopped after step {stopped['step']} of {STEPS}" in sentence(ended)
    assert "--resume" in sentence(ended)
    resumed = start(*words, "--resume").end()
    assert resumed.returncode == 0, resumed.stderr
    summary = json.loads(resumed.stdout)
    assert summary["model_sha256"] == finished.summary["model_sha256"]
    assert summary["test_accuracy"] == finished.summary["test_accuracy"]
    assert len(list(saved.iterdir())) == 2


def test_sigterm_without_checkpoint(start: Starter) -> None:
    running = start(*ENDLESS, "--quiet")
    running.wait_for_step(10)
    workers = running.workers()
    running.process.send_signal(signal.SIGTERM)
    ended = running.end()
    assert ended.returncode == 128 + signal.SIGTERM
    assert "nothing was saved" in sentence(ended)
    assert not any(map(alive, workers))


def test_ctrl_c_while_workers_still_start(start: Starter) -> None:
    running = start(*ENDLESS)
    wait_for(lambda: running.process.poll() is not None or len(running.workers()) == 2)
    workers = running.workers()
    running.process.send_signal(signal.SIGINT)
    ended = running.end()
    assert ended.returncode == 130
    assert sentence(ended) == "sparsewire: stopped before the first step"
    assert not any(map(alive, workers))


def test_second_ctrl_c_stops_at_once(start: Starter) -> None:
    running = start(*ENDLESS)
    running.wait_for_step(10)
    workers = running.workers()
    # A worker that stands still keeps the first Ctrl-C from ever coming to an end.
    os.kill(workers[1], signal.SIGSTOP)
    running.process.send_signal(signal.SIGINT)
    assert running.process.stderr is not None
    while "stopping" not in running.process.stderr.readline():
        pass
    running.process.send_signal(signal.SIGINT)
    ended = running.end()
    assert ended.returncode == 130
    assert sentence(ended) == "sparsewire: stopped at once; nothing was saved"
    assert not any(map(alive, workers))


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_worker_is_named(start: Starter, rank: int) -> None:
    running = start(*ENDLESS)
    running.wait_for_step(20)
    workers = running.workers()
    os.kill(workers[rank], signal.SIGKILL)
    ended = running.end()
    assert ended.returncode == 1
    said = sentence(ended)
    assert f"worker {rank} was ended by SIGKILL after " in said
    assert int(said.split()[-2]) >= 20
    assert not any(map(alive, workers))


def test_killed_launcher_leaves_no_orphan(start: Starter) -> None:
    running = start(*ENDLESS)
    running.wait_for_step(10)
    workers = running.workers()
    assert len(workers) == 2
    running.process.kill()
    wait_for(lambda: not any(map(alive, workers)))


def test_divergence_is_explained(start: Starter) -> None:
    ended = start("--epochs", "2", "--lr", "1e30").end()
    assert ended.returncode == 1
    assert "try a smaller --lr than 1e+30" in sentence(ended)


def test_as_a_rank_of_torchrun(data: Path, finished: Finished) -> None:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["train", "mnist", *QUICK, "--data", str(data), "--epochs", str(EPOCHS)]
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            *torchrun,
            "-m",
            "sparsewire.tools.cli",
            *words,
            "--json",
            "--quiet",
        ],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    assert summary["workers"] == 2
    assert summary["model_sha256"] == finished.summary["model_sha256"]


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_on_a_lab(start: Starter, finished: Finished) -> None:
    ended = start("--epochs", str(EPOCHS), "--rate", "1gbit", "--json").end()
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["model_sha256"] == finished.summary["model_sha256"]


def test_compare_on_a_terminal(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    terminal, end = pty.openpty()
    words = ["compare", "mnist", "--workers", "2", "--hidden", "32", "--batch-size", "32"]
    words += ["--data", str(data), "--epochs", "2", "--out", str(out)]
    words += ["--schemes", "Dense()", "Scheme(TopK(0.05), values=BFloat16())"]
    with subprocess.Popen(
        [sys.executable, "-m", "sparsewire.tools.cli", *words],
        env=environment(TERM="xterm", COLUMNS="120"),
        stdout=subprocess.PIPE,
        stderr=end,
        text=True,
    ) as process:
        os.close(end)
        shown = _read_all(terminal)
        table, _ = process.communicate()
    assert process.returncode == 0, shown
    assert "[1/2] Dense()" in shown
    assert "[2/2]" in shown
    assert "accuracy" in shown
    assert "Dense()" in table
    assert "values=BFloat16()" in table
    results = json.loads((out / "results.json").read_text())
    first, second = results["results"]
    for one in (first, second):
        low, high = one["step_quartiles"]
        assert 0 < low <= one["step_seconds"] <= high
    assert len(first["test_accuracies"]) == 2
    assert first["reduction"] < 1.1 < 5 < second["reduction"]
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert [record["record"] for record in read(out / "metrics.jsonl")].count("summary") == 2


def _read_all(terminal: int) -> str:
    """Everything written to a terminal until its last writer is gone."""
    shown = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # how Linux says that nobody has the other end any more
            part = b""
        if not part:
            os.close(terminal)
            return shown.decode()
        shown += part
