"""What the benchmarks share: interleaved medians, lines that are printed and saved, the machine."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

import sparsewire as sw

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Job = Callable[[], object]


@dataclass
class Page:
    """What is printed, and saved at the end if asked for."""

    lines: list[str] = field(default_factory=list)

    def say(self, text: str = "") -> None:
        print(text, flush=True)
        self.lines.append(text)

    def target(self, name: str, value: float, limit: float, unit: str) -> None:
        """One line that says whether a target is met."""
        status = "PASS" if value <= limit else "FAIL"
        self.say(f"  {status}  {name}: {value:.4g} {unit}, target at most {limit:.4g}")

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(self.lines) + "\n")


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_times(
    jobs: Mapping[str, Job],
    repeats: int,
    device: torch.device | None = None,
    warm_up: int = 2,
) -> dict[str, float]:
    """Seconds per job, all jobs taking turns; the first rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(repeats + warm_up):
        for name, job in jobs.items():
            seconds = _time_on_gpu(job) if device and device.type == "cuda" else _time(job)
            if number >= warm_up:
                times[name].append(seconds)
    return {name: statistics.median(taken) for name, taken in times.items()}


def _time(job: Job) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def _time_on_gpu(job: Job) -> float:
    """The device's own time: launches are queued before the clock starts, as in a CUDA graph."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(8_000_000)  # some milliseconds for the host to run ahead
    begin.record()
    job()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def machine(device: torch.device | None = None) -> str:
    """Processor, cores, versions and commit."""
    name = _processor()
    if device is not None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    commit = os.environ.get("COMMIT") or asked.stdout.strip() or "no commit"
    return (
        f"{name}, {os.cpu_count()} cores; Python {platform.python_version()}, torch "
        f"{torch.__version__}, {_compilers()}, sparsewire {sw.__version__} at {commit}"
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = []
    if cpuinfo.exists():
        names = [ln for ln in cpuinfo.read_text().splitlines() if ln.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


def _compilers() -> str:
    found = []
    for package in ("numba", "triton"):
        try:
            found.append(f"{package} {__import__(package).__version__}")
        except ImportError:
            found.append(f"no {package}")
    return ", ".join(found)
