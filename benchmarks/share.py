"""The share of a training step that goes into select, encode and decode, and how well TopK guesses.

    python benchmarks/share.py                 # the MNIST network, 4 workers, on this CPU
    python benchmarks/share.py --device cuda   # ResNet-18 and a GPT-2 small, 8 workers, on one GPU
    python benchmarks/share.py --only guesses  # only the misses of TopK's floor

Workers are simulated: one process works for all of them, and what is shown is one worker's part.
The kernels of plain torch ("before") and the fast ones ("after") take turns in the same run.
ResNet-18's guesses need real images: --cifar names a binary batch of CIFAR-10.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import RESULTS, ROOT, Page, machine, median_times
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sparsewire as sw
from sparsewire.counters import Counters
from sparsewire.exchange import Call, Exchange
from sparsewire.groups.simulated import SimulatedGroup
from sparsewire.kernels import SWITCH
from sparsewire.segments import Segments
from sparsewire.state import RESIDUAL, StepState
from sparsewire.tools.tasks import mnist
from sparsewire.tools.tasks.models import Transformer, resnet18
from sparsewire.workspace import Workspace

Batch = tuple[Tensor, Tensor]
SCHEMES = ("TopK(0.01)", "Threshold(0.01)", "Scheme(TopK(0.01), values=TwoBit())")
page = Page()


@dataclass
class Training:
    """A network, its data and what it costs to go forward and backward once."""

    name: str
    model: nn.Module
    batches: Callable[[], Iterator[Batch]]
    rate: float

    def backward(self, batch: Batch) -> None:
        self.model.zero_grad(set_to_none=True)
        output = self.model(batch[0])
        cross_entropy(output.flatten(0, -2), batch[1].flatten()).backward()

    def gradient(self, exchange: Exchange, batch: Batch) -> Tensor:
        self.backward(batch)
        found = dict(self.model.named_parameters())
        parts = [found[span.name].grad for span in exchange.segments.params]
        return torch.cat([part.reshape(-1) for part in parts if part is not None])

    def exchange(self, scheme: str, workers: int) -> Exchange:
        chosen = sw.parse(scheme).at(0)
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        return Exchange(chosen, chosen.partition(shapes), workers)


class Crew:
    """Workers that exchange the same gradient over and over: only the time counts."""

    def __init__(self, exchange: Exchange, gradient: Tensor) -> None:
        self.exchange, self.step = exchange, 0
        self.ranks = range(exchange.world_size)
        self.group = SimulatedGroup(exchange.world_size)
        self.flats = [gradient.clone() for _ in self.ranks]
        self.pages = [pages(exchange, gradient.device) for _ in self.ranks]
        self.all_counters = [Counters() for _ in self.ranks]
        self.work = [Workspace() for _ in self.ranks]

    def once(self) -> None:
        runs = [
            self.exchange.run(
                self.flats[rank],
                StepState(*self.pages[rank]),
                Call(self.step, rank),
                self.all_counters[rank],
                self.work[rank],
            )
            for rank in self.ranks
        ]
        self.group.drive(runs, self.all_counters)
        for both in self.pages:
            both.reverse()
        self.step += 1


def pages(exchange: Exchange, device: torch.device) -> list[dict[str, Tensor]]:
    """What a worker remembers, as the last step left it and as this one writes it."""
    size = exchange.segments.size + 1
    return [{RESIDUAL: torch.zeros(size, device=device)} for _ in range(2)]


def perceptron() -> Training:
    """The first paper's network for MNIST: three hidden layers of 4096, 36.8 million parameters."""
    data = mnist.load(mnist.find(ROOT / "data" / "mnist"))

    def batches() -> Iterator[Batch]:
        for epoch in range(100):
            for chosen in mnist.order(0, epoch, len(data.train)).split(40):
                yield data.train.batch(chosen)

    return Training("MNIST 3×4096", mnist.build((4096,) * 3, seed=0), batches, 0.05)


def images(cifar: Path | None, device: torch.device) -> Training:
    """ResNet-18 on CIFAR-10, or on noise where only the time counts."""
    torch.manual_seed(0)
    if cifar is None:
        pixels, labels = torch.randn(1280, 3, 32, 32), torch.randint(10, (1280,))
    else:
        content = bytearray(cifar.read_bytes())
        records = torch.frombuffer(content, dtype=torch.uint8).view(-1, 3073)
        pixels, labels = (
            records[:, 1:].reshape(-1, 3, 32, 32).float() / 64 - 2,
            records[:, 0].long(),
        )
    pixels, labels = pixels.to(device), labels.to(device)

    def batches() -> Iterator[Batch]:
        for epoch in range(1000):
            for chosen in mnist.order(0, epoch, len(labels)).to(device).split(128):
                yield pixels[chosen], labels[chosen]

    return Training("ResNet-18", resnet18().to(device), batches, 0.1)


def language(device: torch.device) -> Training:
    """A transformer as large as GPT-2 small, on 8 × 512 tokens."""
    torch.manual_seed(0)
    tokens = torch.randint(50257, (8, 513), device=device)

    def batches() -> Iterator[Batch]:
        while True:
            yield tokens[:, :-1], tokens[:, 1:]

    return Training("GPT-2 small", Transformer().to(device), batches, 0.1)


def shares(training: Training, workers: int, device: torch.device, repeats: int) -> None:
    """One table: forward and backward beside coding, before and after."""
    batch = next(training.batches())
    jobs: dict[str, Callable[[], object]] = {"step": lambda: training.backward(batch)}
    for scheme in SCHEMES:
        for kind in ("reference", "auto"):
            exchange = training.exchange(scheme, workers)
            crew = Crew(exchange, training.gradient(exchange, batch))

            def once(crew: Crew = crew, kind: str = kind) -> None:
                os.environ[SWITCH] = kind
                crew.once()

            jobs[f"{kind} {scheme}"] = once
    times = median_times(jobs, repeats, device, warm_up=3)
    size = sum(p.numel() for p in training.model.parameters())
    page.say()
    page.say(
        f"{training.name}, {size / 1e6:.1f}M parameters, {workers} simulated workers: forward and "
        f"backward {1e3 * times['step']:.1f} ms"
    )
    page.say(f"  {'select + encode + decode of one worker':<40} before   share    after   share")
    for scheme in SCHEMES:
        cells = []
        for kind in ("reference", "auto"):
            mine = times[f"{kind} {scheme}"] / workers
            cells.append(f"{1e3 * mine:6.1f} ms {100 * mine / (mine + times['step']):5.1f} %")
        page.say(f"  {scheme:<40} {'  '.join(cells)}")
    os.environ.pop(SWITCH, None)


PHASES = (("start", 40, 1.0), ("steady", 120, 1.0), ("rate / 10", 80, 0.1))


def guesses(training: Training, device: torch.device) -> None:
    """Train alone with TopK, and count the segments whose floor was too high or too low to help."""
    exchange = training.exchange("TopK(0.01)", 1)
    segments = exchange.segments
    kept = pages(exchange, device)
    counters, work, step = Counters(), Workspace(), 0
    parameters = dict(training.model.named_parameters())
    batches = training.batches()
    page.say()
    page.say(f"{training.name}: the floor that TopK(0.01) guesses for each of its segments")
    page.say(
        f"  {'phase':<12} {'steps':>6} {'segments':>7} {'missed':>7}   a step that misses costs"
    )
    for phase, steps, factor in PHASES:
        before = misses(segments, device, work)
        costs: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(steps):
            flat = training.gradient(exchange, next(batches))
            seen = misses(segments, device, work)
            run = exchange.run(flat, StepState(*kept), Call(step, 0), counters, work)
            started = counters.seconds["select"]
            SimulatedGroup(1).drive([run], [counters])
            is_miss = misses(segments, device, work) > seen
            costs[is_miss].append(counters.seconds["select"] - started)
            kept.reverse()
            step += 1
            with torch.no_grad():
                for span, view in segments.views(flat):
                    update = view.view(span.shape)
                    parameters[span.name].sub_(update, alpha=training.rate * factor)
        missed = misses(segments, device, work) - before
        total = steps * len(segments.sparse)
        slow = ""
        if device.type == "cpu" and all(costs.values()):
            ratio = statistics.median(costs[True]) / statistics.median(costs[False])
            slow = f"{ratio:.2f} times one that does not"
        share = f"{100 * missed / total:6.2f} %"
        page.say(f"  {phase:<12} {steps:6} {len(segments.sparse):7} {share}   {slow}")


def misses(segments: Segments, device: torch.device, work: Workspace) -> int:
    """How many segments were missed so far."""
    if device.type == "cuda":
        from sparsewire.kernels.cuda import plan

        return int(plan.plan_of(segments, device, work).tally[:, 0].sum())
    from sparsewire.kernels.cpu import extract

    return int(extract.plan_of(segments, "counts", work).tally[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cifar", type=Path, help="data_batch_1.bin of CIFAR-10")
    parser.add_argument("--only", choices=("shares", "guesses"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    page.say(machine(device))
    if device.type == "cpu":
        page.say(f"{torch.get_num_threads()} threads")
    if options.only != "guesses":
        if device.type == "cpu":
            shares(perceptron(), 4, device, options.repeats)
        else:
            shares(images(None, device), 8, device, options.repeats)
            shares(language(device), 8, device, options.repeats)
    if options.only != "shares":
        if device.type == "cpu":
            guesses(perceptron(), device)
        if options.cifar is not None:
            guesses(images(options.cifar, device), device)
    if options.save:
        page.save(options.out / f"share-{device.type}.txt")


if __name__ == "__main__":
    main()
