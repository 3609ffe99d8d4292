"""Runs the real command in processes of its own, with a small share of MNIST."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.patience import wait_for
from tests.tools.tasks import idxfile

SOURCE = Path(__file__).parents[3] / "src"
COMMAND = [sys.executable, "-m", "sparsewire.tools.cli"]
TRAINED = 2112  # 33 steps an epoch for 2 workers with 32 images each
# Steps of a few milliseconds, so that most of a test is spent on starting processes.
QUICK = ["--workers", "2", "--hidden", "32", "--batch-size", "32", "--scheme", "TopK(0.05)"]


def environment(**more: str) -> dict[str, str]:
    """The environment for a command, with the source tree first on Python's path."""
    path = os.pathsep.join([str(SOURCE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), **more}


def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*COMMAND, *words], env=environment(**more), capture_output=True, text=True
    )


def sentence(ended: subprocess.CompletedProcess[str]) -> str:
    """The one line a failed command says, checked to be one line and no traceback."""
    lines = ended.stderr.splitlines()
    said = [line for line in lines if line.startswith("sparsewire: ")]
    assert len(said) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    return said[0]


def read(metrics: Path) -> list[dict[str, Any]]:
    """All records that are completely written."""
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@dataclass
class Running:
    """A training under way."""

    process: subprocess.Popen[str]
    metrics: Path

    def wait_for_step(self, step: int) -> None:
        """Wait until it has told about `step`."""

        def there() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            records = [record for record in read(self.metrics) if record["record"] == "step"]
            return bool(records) and records[-1]["step"] >= step

        wait_for(there)

    def workers(self) -> list[int]:
        """The process ids of its workers, in order of their ranks."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        found: dict[int, int] = {}
        for pid in (int(pid) for task in threads for pid in task.read_text().split()):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ranks = [v for v in variables if v.startswith(b"RANK=")]
            if ranks:
                found[int(ranks[0][5:])] = pid
        return [found[rank] for rank in sorted(found)]

    def end(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end."""
        out, err = self.process.communicate()
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)


def alive(pid: int) -> bool:
    """Whether a process still runs; a zombie does not."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@dataclass
class Starter:
    """Starts trainings that outlive the call, and ends what a failed test leaves."""

    data: Path
    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def __call__(self, *words: str) -> Running:
        metrics = self.folder / f"metrics-{len(self.started)}.jsonl"
        paths = ["--data", str(self.data), "--metrics", str(metrics)]
        process = subprocess.Popen(
            [*COMMAND, "train", "mnist", *QUICK, *words, *paths],
            # A launcher that is killed cannot remove its folder: let it lie in the test's own.
            env=environment(TMPDIR=str(self.folder)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return Running(process, metrics)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small share of MNIST."""
    return idxfile.write_mnist(tmp_path_factory.mktemp("data"), TRAINED, 500)


@pytest.fixture
def start(data: Path, tmp_path: Path) -> Iterator[Starter]:
    """Starts trainings."""
    starter = Starter(data, tmp_path)
    yield starter
    for process in starter.started:
        process.kill()
        process.communicate()
