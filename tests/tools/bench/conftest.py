"""Results without a measurement, and the real command on a small model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsewire.counters import STAGES
from sparsewire.tools.bench.results import Contender, Results, Run, Sample
from sparsewire.tools.bench.setting import Setting
from sparsewire.tools.bench.step.stopwatch import PARTS
from sparsewire.tools.lab import Link

SOURCE = Path(__file__).parents[3] / "src"

TINY = """
import torch
from torch import nn

def model(rank):
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(8, 32, generator=generator)
    labels = torch.randint(10, (8,), generator=generator)
    return net, lambda net: nn.functional.cross_entropy(net(inputs), labels)
"""


def bench(folder: Path, *words: str, command: str = "step") -> subprocess.CompletedProcess[str]:
    """Run a command under `sparsewire bench` to its end in a folder."""
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, "-m", "sparsewire.tools.cli", "bench", command, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a user's module."""
    (tmp_path / "tiny.py").write_text(TINY)
    return tmp_path


def contender(name: str, *seconds: float, failed: str | None = None) -> Contender:
    """One whose steps took so long, half of it exchanging, half of which was hidden."""
    samples = []
    for number, total in enumerate(seconds):
        parts = {**dict.fromkeys(PARTS, 0.0), "forward": 0.3 * total, "backward": 0.2 * total}
        parts["exchange"] = 0.5 * total
        busy = {**dict.fromkeys(STAGES, 0.0), "exchange": total}
        hidden = {**dict.fromkeys(STAGES, 0.0), "exchange": 0.5 * total}
        samples.append(Sample(number, total, (total, total), parts, busy, hidden, 1000.0, 1100.0))
    return Contender(name, tuple(samples), failed=failed)


def run(*contenders: Contender, rate: int | None = 10**9, hosts: int = 2) -> Run:
    """A network with links that hold what they promise."""
    links = tuple(Link(host, rate, 0.98 * (rate or 1e10), 0.97 * (rate or 1e10)) for host in (0, 1))
    return Run(hosts, "lab", rate, links, contenders)


def results(*runs: Run, name: str = "resnet18") -> Results:
    """A measurement of two hosts."""
    model = {"name": name, "parameters": 11_000_000, "tensors": 62, "examples": 16}
    return Results("step", setting(name), model, runs)


def setting(name: str = "resnet18") -> Setting:
    """Where and with what something was measured."""
    return Setting(
        created="2020-02-02T20:20:20+00:00",
        machine={"cpu": "a <fast> one", "cores": 2, "memory": 2**33, "system": "Linux"},
        versions={"sparsewire": "0.1", "torch": "2.9", "python": "3.12"},
        commit=None,
        arguments={
            "command": "sparsewire bench step",
            "model": name,
            "rates": ["1gbit"],
            "out": "runs & more",
        },
    )


@pytest.fixture
def measured() -> Results:
    """A measurement where sparse wins on the slow network and dense on the fast one."""
    floor = contender("compute alone", 0.2, 0.21, 0.22)
    broken = contender("bf16 hook", failed="the backend <gloo> cannot add bfloat16")
    slow = run(
        floor,
        contender("dense DDP", 2.2, 2.26, 2.3),
        broken,
        contender("PowerSGD rank 1", 0.5, 0.5),
        contender("TopK(0.01)", 0.68, 0.69, 0.7),
    )
    fast = run(floor, contender("dense DDP", 0.3), contender("TopK(0.01)", 0.4), rate=None)
    return results(slow, fast)
