"""Bounds on a few ratios, so that a change that makes something half as slow again does not pass.

    python benchmarks/guard.py      # or make bench-guard: well under a minute

A ratio compares two jobs that take turns in one run. Times are CPU times, which other work on the
machine hardly changes, and lower quartiles, because what disturbs a job only ever makes it slower.
A ratio above its bound is measured again, twice: noise goes away, a slow kernel stays.

The bounds are about 1.35 times what a shared server with two cores shows (AMD EPYC). On another
machine, compare with the commit before yours. Time spent waiting is not counted.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from encode import SELECTORS, Rank, cut, decoding, exchange_job, noise
from measure import Job, Page, machine
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import sparsewire as sw
from sparsewire import kernels

BOUNDS = {
    # one rank's work, in copies of the gradient
    "select Threshold(0.01)": 4.9,
    "select TopK(0.01)": 3.9,
    "select RandomK(0.01)": 3.6,
    "select BlockRandomK(0.01)": 2.9,
    "decode 8": 2.2,
    "exchange TopK(0.01)": 9.0,
    "exchange TopK(0.01), TwoBit()": 12.0,
    # between two processes
    "exchange / all_gather of as many bytes": 24.0,
    "step with sparse_hook / plain DDP": 3.7,
    # in a fresh interpreter
    "import sparsewire / import torch": 0.15,
}
ATTEMPTS = 3
SIZE = 1_000_000  # coordinates: few enough for the caches, where a kernel's own work shows most
ENTRIES = 1 << 15  # of a message between the two processes
GATHERS = 8  # in a row, since one alone takes too little time to measure
WARM_UP = 5
Measurement = Callable[[], dict[str, float]]
IMPORT = """
import time
start = time.process_time()
import torch
between = time.process_time()
from sparsewire import TopK, attach
print((time.process_time() - between) / (between - start))
"""


def cpu_times(
    jobs: Mapping[str, Job], repeats: int, meet: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """The lower quartile of each job's CPU time, all jobs taking turns."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(WARM_UP + repeats):
        for name, job in jobs.items():
            meet()
            start = time.process_time()
            job()
            if number >= WARM_UP:
                times[name].append(time.process_time() - start)
    return {name: sorted(taken)[len(taken) // 4] for name, taken in times.items()}


def coding() -> dict[str, float]:
    """What one rank does, in copies of the gradient."""
    gradients = noise(2 * SIZE, torch.device("cpu"))
    source = gradients[0][:SIZE]
    target = torch.empty_like(source)
    jobs: dict[str, Job] = {"copy": lambda: target.copy_(source)}
    for selector in SELECTORS:
        segments = cut(selector, "ResNet-18", SIZE)
        jobs[f"select {selector!r}"] = Rank(selector, segments, gradients).select
    jobs["decode 8"] = decoding(SIZE, gradients)["decode 8"]
    plain = sw.Scheme(sw.TopK(0.01), collective=sw.AllGather())
    short = sw.Scheme(sw.TopK(0.01), values=sw.TwoBit(), collective=sw.AllGather())
    jobs["exchange TopK(0.01)"] = exchange_job(plain, SIZE, gradients)
    jobs["exchange TopK(0.01), TwoBit()"] = exchange_job(short, SIZE, gradients)
    times = cpu_times(jobs, repeats=60)
    return {name: times[name] / times["copy"] for name in jobs if name != "copy"}


def two_ranks() -> dict[str, float]:
    """What two processes do together."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (folder,), nprocs=2)  # type: ignore[no-untyped-call]
        found: dict[str, float] = torch.load(Path(folder, "ratios"))
    return found


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    exchange, gather = _exchange_and_gather()
    inputs = torch.randn(8, 64)
    plain, sparse = (DistributedDataParallel(_net(), bucket_cap_mb=0.1) for _ in range(2))
    handle = sw.attach(sparse, "TopK(0.01)", communicate="gradients")
    jobs: dict[str, Job] = {
        "gather": gather,
        "exchange": exchange,
        "plain": lambda: plain(inputs).square().mean().backward(),
        "sparse": lambda: sparse(inputs).square().mean().backward(),
    }
    times = cpu_times(jobs, 80, meet=dist.barrier)
    if rank == 0:
        found = {
            "exchange / all_gather of as many bytes": GATHERS * times["exchange"] / times["gather"],
            "step with sparse_hook / plain DDP": times["sparse"] / times["plain"],
        }
        torch.save(found, Path(folder, "ratios"))
    handle.detach()
    dist.barrier()
    dist.destroy_process_group()


def _net() -> nn.Module:
    """Seven buckets of little, so that a step is mostly overhead."""
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))


def _exchange_and_gather() -> tuple[Job, Job]:
    """An exchange of a quarter of a gradient, and all-gathers of as many bytes."""
    gradients = {"w": torch.randn(4 * ENTRIES)}
    group = sw.groups.DistributedGroup()
    state = sw.functional.init(sw.Scheme(sw.TopK(0.25), dense_1d=False), gradients)

    def exchange() -> None:
        nonlocal state
        _, state = sw.functional.exchange(gradients, state, group)

    exchange()  # the first one also compares headers
    before = state.counters.bytes_sent
    exchange()
    message = torch.zeros(state.counters.bytes_sent - before, dtype=torch.uint8)
    received = [torch.empty_like(message) for _ in range(2)]

    def gather() -> None:
        for _ in range(GATHERS):
            dist.all_gather(received, message)

    return exchange, gather


def imports() -> dict[str, float]:
    """What importing sparsewire costs on top of torch."""
    command = [sys.executable, "-c", IMPORT]
    runs = [subprocess.run(command, capture_output=True, check=True) for _ in range(4)]
    return {"import sparsewire / import torch": min(float(run.stdout) for run in runs)}


MEASUREMENTS: tuple[Measurement, ...] = (coding, two_ranks, imports)


def measure(measurements: Sequence[Measurement] = MEASUREMENTS) -> dict[str, float]:
    """The least of every ratio; what is above a bound is measured up to `ATTEMPTS` times."""
    least: dict[str, float] = {}
    for measurement in measurements:
        for _ in range(ATTEMPTS):
            found = measurement()
            least |= {name: min(value, least.get(name, value)) for name, value in found.items()}
            if all(least[name] <= BOUNDS[name] for name in found):
                break
    return least


def main() -> None:
    torch.set_num_threads(1)
    kernels.prepare("cpu")
    page = Page()
    page.say(machine())
    ratios = measure()
    for name, bound in BOUNDS.items():
        page.target(name, ratios[name], bound, "times")
    if any(ratios[name] > bound for name, bound in BOUNDS.items()):
        raise SystemExit(
            "Something became slower. Run this on the commit before yours to see whether it is the "
            "machine. If the price is worth paying, raise the bound in benchmarks/guard.py."
        )


if __name__ == "__main__":
    main()
