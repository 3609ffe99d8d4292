"""Table 2 of Eghlidi and Jaggi on one device: what a step of one of 8 workers consists of.

    python benchmarks/table2.py --device cuda --save
    python benchmarks/table2.py --batch 8 --repeats 3   # on this CPU, to see that it runs

ResNet-18, 128 images of 32 × 32 a worker, by layer, 1 %. Forward and backward are the same for all
schemes. Select is choosing and taking out, encode is writing a message, decode is reading those of
8 workers and adding them up. The gradient exchange itself is not here: it takes what the network
takes, and `sparsewire bench step` measures that. On CUDA every stage is captured in a graph, so
that the host's launches do not count, and products are bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, Page, machine, median_times
from torch import Tensor
from torch.nn.functional import cross_entropy

import sparsewire as sw
from sparsewire.adapters.capture import Captured
from sparsewire.counters import Counters
from sparsewire.exchange import Call, Exchange, Finding
from sparsewire.groups import drive
from sparsewire.groups.simulated import SimulatedGroup
from sparsewire.randomness import RandomKey
from sparsewire.requests import Request, Routine
from sparsewire.selectors import Accumulation
from sparsewire.state import RESIDUAL, StepState
from sparsewire.tools.tasks.models import resnet18
from sparsewire.workspace import Workspace

WORKERS = 8
STEP = 8  # of which the stages are timed: worker 0 leads, where one does
SCHEMES = {
    "Standard SGD": "Dense()",
    "Top-k": "TopK(0.01)",
    "Random-k, allGather": "RandomK(0.01, shared=False)",
    "Random-k, allReduce": "RandomK(0.01)",
    "Block-random-k, allGather": "BlockRandomK(0.01)",
    "Block-random-k, allReduce": "BlockRandomK(0.01, shared=True)",
    "Threshold": "Threshold(0.01)",
    "Top block, allReduce": "TopBlock(0.01)",
    "Leader top-k, allReduce": "LeaderTopK(0.01)",
    "Union of top-k, allReduce": "UnionTopK(0.01)",
}
Job = Callable[[], object]
page = Page()


class Network:
    """ResNet-18 on noise."""

    def __init__(self, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self._device = device
        self._model = resnet18().to(device, memory_format=torch.channels_last)
        images = torch.randn(batch, 3, 32, 32, device=device)
        self._images = images.contiguous(memory_format=torch.channels_last)
        self._labels = torch.randint(10, (batch,), device=device)
        self.shapes = {name: tuple(p.shape) for name, p in self._model.named_parameters()}

    def forward(self) -> Tensor:
        is_cuda = self._device.type == "cuda"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=is_cuda):
            return cross_entropy(self._model(self._images), self._labels)

    def backward(self) -> dict[str, Tensor]:
        found = torch.autograd.grad(self.forward(), list(self._model.parameters()))
        return dict(zip(self.shapes, found, strict=True))


class Recorder(SimulatedGroup):
    """Keeps what worker 0 is answered."""

    def __init__(self) -> None:
        super().__init__(WORKERS)
        self.answers: list[Any] = []

    def carry(self, ranks: Sequence[int], requests: Sequence[Request]) -> list[Any]:
        answers = super().carry(ranks, requests)
        self.answers.append(answers[0])
        return answers


class Enough(Exception):
    """All answers were given."""


class Player:
    """Worker 0's group, which gives the first of the answers that were recorded."""

    rank, size, doing = 0, WORKERS, ""

    def __init__(self, answers: Sequence[Any], count: int) -> None:
        self._answers, self._left = iter(answers), count

    def start(self, request: Request) -> Any:
        return next(self._answers)

    def wait(self, ticket: Any) -> Any:
        if not self._left:
            raise Enough
        self._left -= 1
        return ticket

    def abandon(self, error: Exception) -> None:
        raise AssertionError("what was recorded is fine") from error


class Worker:
    """One of 8 who exchange the same gradient over and over: only its time counts."""

    def __init__(self, text: str, gradient: dict[str, Tensor], device: torch.device) -> None:
        self._scheme = sw.parse(text).at(0)
        shapes = {name: tuple(g.shape) for name, g in gradient.items()}
        segments = self._scheme.partition(shapes)
        parts = [gradient[param.name].reshape(-1) for param in segments.params]
        self._gradient = torch.cat(parts).float()
        self._exchange = Exchange(self._scheme, segments, WORKERS)
        blank = torch.zeros(len(self._gradient) + 1, device=device)
        self._state = StepState({RESIDUAL: blank}, {RESIDUAL: blank.clone()})  # of all of them
        self._meters = [Counters() for _ in range(WORKERS)]
        self._work = [Workspace() for _ in range(WORKERS)]
        for step in (0, 1, 2, STEP):  # headers first; then what TopK guesses by
            group = Recorder()
            group.drive([self._run(rank, step) for rank in range(WORKERS)], self._meters)
        self._answers = group.answers

    def _run(self, rank: int, step: int = STEP) -> Routine[Finding]:
        flat, call = self._gradient.clone(), Call(step, rank)
        kept = self._state, call, self._meters[rank], self._work[rank]
        return self._exchange.run(flat, *kept)

    def select(self) -> None:
        """Choose and take out, as worker 0 would alone."""
        segments, state = self._exchange.segments, self._state
        addend = self._scheme.memory.addend(self._gradient, state, segments, WORKERS)
        accumulation = Accumulation(state.before[RESIDUAL], addend, state.after[RESIDUAL])
        key = RandomKey(self._scheme.seed, STEP, 0)
        self._scheme.selector.select(accumulation, segments, key, state, self._work[0])

    def encode(self) -> None:
        """All that comes before the last message."""
        self._go(len(self._answers) - 1)

    def decode(self) -> None:
        """All."""
        self._go(len(self._answers))

    def _go(self, count: int) -> None:
        with contextlib.suppress(Enough):
            drive(self._run(0), Player(self._answers, count), self._meters[0])


def captured(job: Job, device: torch.device) -> Job:
    """The job as one launch, on CUDA."""
    graph = Captured(job, device)
    for _ in range(4):
        graph()
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rows", nargs="+", choices=SCHEMES, default=list(SCHEMES), metavar="ROW")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    page.say(machine(device))
    network = Network(options.batch, device)
    gradient = network.backward()
    copied = torch.zeros(sum(g.numel() for g in gradient.values()), device=device)
    jobs: dict[str, Job] = {
        "copy": lambda: copied.clone(),
        "forward": captured(network.forward, device),
        "backward": captured(network.backward, device),
    }
    schemes = {row: SCHEMES[row] for row in options.rows}
    for text in schemes.values():
        worker = Worker(text, gradient, device)
        for stage in (worker.select, worker.encode, worker.decode):
            jobs[f"{text} {stage.__name__}"] = captured(stage, device)
    times = {k: 1e3 * t for k, t in median_times(jobs, options.repeats, device, 3).items()}
    passes = times["backward"]
    page.say(
        f"ResNet-18, {options.batch} images, one of {WORKERS} workers: forward "
        f"{times['forward']:.2f} ms, backward {passes - times['forward']:.2f} ms; a copy of the "
        f"gradient {times['copy']:.3f} ms"
    )
    page.say()
    page.say(f"{'ms of one worker':<28}  select  encode  decode     all   of forward + backward")
    for row, text in schemes.items():
        select, encoded, whole = (times[f"{text} {s}"] for s in ("select", "encode", "decode"))
        clone = times["copy"]  # every run works on a copy of the gradient
        cells = (select, max(encoded - clone - select, 0.0), whole - encoded, whole - clone)
        text = "  ".join(f"{cell:6.2f}" for cell in cells)
        page.say(f"{row:<28}  {text}  {100 * (whole - clone) / passes:6.1f} %")
    if options.save:
        page.save(options.out / f"table2-{device.type}.txt")


if __name__ == "__main__":
    main()
