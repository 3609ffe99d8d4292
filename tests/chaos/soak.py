"""A long training whose memory, descriptors and threads must not grow.

    python -m tests.chaos.soak --minutes 60 [--attaching 5] [--out FOLDER]

One process after the other: ranks that train gradients and updates by turns, then ranks that attach
and detach all the time. Both are sampled from outside, and drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from sparsewire.tools.bench.drawing import INK, OF_LINES, blank, plain, write

from ..patience import patience
from .stage import ROOT

WORLD = 2
SAMPLES = 240  # of each phase
Phase = Literal["training", "attaching"]
PHASES: tuple[Phase, ...] = ("training", "attaching")
MEGABYTES = 10.0  # that memory may grow between the second fifth and the last
UNITS = {"memory": "MB", "descriptors": "", "threads": ""}

Sample = dict[str, float]


def sample(pid: int) -> Sample:
    """Return what a process uses now."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        "memory": round(float(status["VmRSS"].split()[0]) / 1024, 1),
        "descriptors": float(len(os.listdir(f"/proc/{pid}/fd"))),
        "threads": float(status["Threads"]),
    }


def play(phase: Phase, seconds: float) -> dict[str, Any]:
    """Run one phase, and return the samples of each rank, and how far they came."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparsewire-soak-")))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = []
        for rank in range(WORLD):
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.chaos.soak_rank"),
                    *(phase, str(rank), str(WORLD), str(store.port), str(folder)),
                ],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"},
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        end = time.monotonic() + patience(60)
        while len(list(folder.glob("rank-*"))) < WORLD:
            assert time.monotonic() < end, "the ranks do not begin"
            time.sleep(0.1)
        series: list[list[Sample]] = [[] for _ in ranks]
        began = time.monotonic()
        for number in range(SAMPLES):
            time.sleep(max(0.0, began + (number + 1) * seconds / SAMPLES - time.monotonic()))
            codes = [process.poll() for process in ranks]
            assert codes == [None] * WORLD, f"ranks ended with {codes}"
            minutes = round((time.monotonic() - began) / 60, 3)
            for each, process in zip(series, ranks, strict=True):
                each.append({"minutes": minutes, **sample(process.pid)})
        counts = [int((folder / f"rank-{rank}").read_text()) for rank in range(WORLD)]
        (folder / "over").touch()
        codes = [process.wait(patience(60)) for process in ranks]
        assert codes == [0] * WORLD, f"ranks ended with {codes}"
    return {"minutes": round(seconds / 60, 2), "count": min(counts), "ranks": series}


def growth(series: Sequence[Sample], what: str) -> float:
    """Return by how much something grew from the second fifth of the samples to the last."""
    fifth = len(series) // 5
    early = [each[what] for each in series[fifth : 2 * fifth]]
    return statistics.median(each[what] for each in series[-fifth:]) - statistics.median(early)


def judge(found: Mapping[str, Any]) -> list[str]:
    """Return a line for everything that is measured, and whether it is flat."""
    lines = []
    for phase, each in found.items():
        things = "steps" if phase == "training" else "attached models"
        lines.append(f"{phase}: {each['minutes']:g} minutes, {each['count']} {things}")
        for what, unit in UNITS.items():
            grown = max(growth(series, what) for series in each["ranks"])
            last = max(series[-1][what] for series in each["ranks"])
            limit = MEGABYTES if what == "memory" else 0.0
            verdict = "flat" if grown <= limit else "GROWS"
            lines.append(f"  {what:12} {last:7.0f} {unit:2} {grown:+6.1f} {unit}  {verdict}")
    return lines


def draw(found: Mapping[str, Any], folder: Path) -> None:
    """Draw what the ranks used over time."""
    figure = blank(10, 5)
    grid = figure.subplots(len(PHASES), len(UNITS))
    for row, phase in zip(grid, PHASES, strict=True):
        for axes, (what, unit) in zip(row, UNITS.items(), strict=True):
            title = f"{'Training' if phase == 'training' else 'Attaching and detaching'}: {what}"
            plain(axes, title + (f", {unit}" if unit else ""), "minutes")
            for rank, series in enumerate(found[phase]["ranks"]):
                x, y = zip(*((each["minutes"], each[what]) for each in series), strict=True)
                axes.plot(x, y, color=OF_LINES[1 + rank], linewidth=1.5, label=f"rank {rank}")
            axes.set_ylim(0, 1.25 * max(each[what] for s in found[phase]["ranks"] for each in s))
    grid[0][0].legend(frameon=False, fontsize=9, labelcolor=INK, loc="lower right")
    write(figure, folder / "soak.png", folder / "soak.svg")


def main() -> int:
    """Run, and return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave by cleaning up
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="of training")
    parser.add_argument("--attaching", type=float, default=5, help="minutes of attach and detach")
    parser.add_argument("--out", type=Path, help="where soak.json, soak.png and soak.svg go")
    options = parser.parse_args()
    minutes = {"training": options.minutes, "attaching": options.attaching}
    found = {phase: play(phase, 60 * minutes[phase]) for phase in PHASES}
    lines = judge(found)
    print("\n".join(lines))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "soak.json").write_text(json.dumps(found) + "\n")
        draw(found, options.out)
    return int(any("GROWS" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
