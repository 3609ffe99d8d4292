"""What selecting and summing cost, in copies of the gradient.

    python benchmarks/encode.py                       # this machine's CPU, one thread
    python benchmarks/encode.py --device cuda         # a GPU
    python benchmarks/encode.py --sizes 1e6 --save    # also into benchmarks/results/encode-cpu.*
    python benchmarks/encode.py --redraw              # only the plot, from the results on file

A row is one selector on one partition of the gradient. All jobs of a size take turns, and times are
medians, as multiples of a copy of the same float32 data in the same run. Every step adds another
gradient to the residual that the last step left, as training does. The floor is that addition
alone: torch.add of residual and gradient into the other half of the residual.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from measure import RESULTS, Job, Page, machine, median_times, wait_for
from torch import Tensor

import sparsewire as sw
from sparsewire import kernels
from sparsewire.counters import Counters
from sparsewire.exchange import Call, Exchange, status_of
from sparsewire.groups import drive
from sparsewire.randomness import RandomKey
from sparsewire.segments import Segments
from sparsewire.selectors import NO_STATE, Accumulation, Selector
from sparsewire.state import RESIDUAL, StepState
from sparsewire.tools.bench import drawing
from sparsewire.tools.bench.drawing import INK, MARKERS, OF_LINES
from sparsewire.workspace import Workspace

Shapes = dict[str, tuple[int, ...]]
SELECTORS: tuple[Selector, ...] = (
    sw.Threshold(0.01),
    sw.TopK(0.01),
    sw.RandomK(0.01),
    sw.BlockRandomK(0.01),
)
GRADIENTS = 4  # different ones, in turn
TARGETS = {
    "cpu": {"Threshold": 2.0, "TopK": 3.0, "RandomK": 1.5, "BlockRandomK": 1.5},
    "cuda": {"Threshold": 1.8, "TopK": 2.6, "BlockRandomK": 1.7},
}
DECODE_TARGETS = {"cpu": (1.5, 3.0), "cuda": (0.8, 1.6)}  # of 8 and of 32 messages
SHOWN = {"cpu": 11.17e6, "cuda": 67e6}  # the size that the targets are for
LAYER_PENALTY = 1.2
page = Page()


def resnet18(size: int) -> Shapes:
    """ResNet-18 for CIFAR-10, 62 tensors, its width scaled to about `size` parameters."""

    def conv(name: str, to: int, of: int, kernel: int) -> None:
        shapes[f"{name}.weight"] = (to, of, kernel, kernel)
        shapes[f"{name}.norm.weight"] = shapes[f"{name}.norm.bias"] = (to,)

    width = max(1, round(64 * math.sqrt(size / 11.17e6)))
    shapes: Shapes = {}
    conv("stem", width, 3, 3)
    inner = width
    for stage in range(4):
        outer = width << stage
        for block in range(2):
            name = f"stage{stage}.{block}"
            conv(f"{name}.first", outer, inner, 3)
            conv(f"{name}.second", outer, outer, 3)
            if inner != outer:
                conv(f"{name}.shortcut", outer, inner, 1)
            inner = outer
    shapes["head.weight"], shapes["head.bias"] = (10, inner), (10,)
    return shapes


def transformer(size: int) -> Shapes:
    """150 layers of a transformer, 1,800 tensors, its width scaled to about `size` parameters."""
    width = max(2, round(math.sqrt(size / 150 / 12)))
    shapes: Shapes = {}
    for layer in range(150):
        for name, to, of in (
            ("qkv", 3 * width, width),
            ("out", width, width),
            ("up", 4 * width, width),
            ("down", width, 4 * width),
        ):
            shapes[f"{layer}.{name}.weight"], shapes[f"{layer}.{name}.bias"] = (to, of), (to,)
        for name in ("norm1", "norm2"):
            shapes[f"{layer}.{name}.weight"] = shapes[f"{layer}.{name}.bias"] = (width,)
    return shapes


CUTS: dict[str, tuple[Callable[[int], Shapes], str]] = {
    "global": (resnet18, "global"),
    "ResNet-18": (resnet18, "layer"),
    "transformer": (transformer, "layer"),
}


@dataclass
class Rank:
    """One rank that accumulates and selects, step after step."""

    selector: Selector
    segments: Segments
    gradients: list[Tensor]
    step: int = 0
    pages: list[Tensor] = field(init=False)
    work: Workspace = field(default_factory=Workspace)

    def __post_init__(self) -> None:
        blank = torch.zeros(self.segments.size + 1, device=self.gradients[0].device)
        self.pages = [blank, blank.clone()]

    def gradient(self) -> Tensor:
        return self.gradients[self.step % GRADIENTS][: self.segments.size]

    def select(self) -> kernels.Selection:
        """One step with sparsewire's kernels."""
        before, after = self.pages
        accumulation = Accumulation(before, self.gradient(), after)
        key = RandomKey(0, self.step, 0)
        taken = self.selector.select(accumulation, self.segments, key, NO_STATE, self.work)
        self.pages.reverse()
        self.step += 1
        return taken


@dataclass
class Plain(Rank):
    """The same with what a user would write in torch: add, topk, gather, scatter, per segment."""

    def step_once(self) -> None:
        before, after = self.pages
        torch.add(before[:-1], self.gradient(), out=after[:-1])
        for segment in self.segments.sparse:
            view = after[segment.start : segment.stop]
            if segment.count < segment.length:
                _, indices = view.abs().topk(segment.count, sorted=False)
                view.gather(0, indices)
                view.scatter_(0, indices, 0.0)
        self.pages.reverse()
        self.step += 1


def noise(size: int, device: torch.device) -> list[Tensor]:
    """Gradients with heavy tails, as those of networks have."""
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for _ in range(GRADIENTS):
        one = torch.randn(size, device=device, generator=generator)
        made.append(one.mul_(one.abs()))
    return made


def cut(selector: Selector, name: str, size: int) -> Segments:
    shapes, scope = CUTS[name]
    return sw.Scheme(selector, scope=scope).partition(shapes(size))  # type: ignore[arg-type]


def repeats_for(size: int, device: torch.device, most: int) -> int:
    return most if device.type == "cuda" else max(5, min(most, int(most * 11.17e6 / size)))


def measure(size: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Copies per job at one size."""
    longest = max(cut(sw.TopK(0.01), name, size).size for name in CUTS)
    gradients = noise(max(size, longest), device)
    source = gradients[0][:size]
    target = torch.empty_like(source)
    other, result = torch.zeros_like(source), torch.zeros_like(source)
    jobs: dict[str, Job] = {
        "copy": lambda: target.copy_(source),
        "deposit": lambda: torch.add(other, source, out=result),
    }
    for name in CUTS:
        for selector in SELECTORS:
            rank = Rank(selector, cut(selector, name, size), gradients)
            jobs[f"{selector!r} {name}"] = rank.select
        plain = Plain(sw.TopK(0.01), cut(sw.TopK(0.01), name, size), gradients)
        if device.type == "cuda" or size < 20e6:
            jobs[f"plain {name}"] = plain.step_once
    jobs |= decoding(size, gradients)
    jobs |= exchanges(size, gradients)
    count = repeats_for(size, device, repeats)
    times = median_times(jobs, count, device, warm_up=6)
    wait_for(device)
    copies = {name: seconds / times["copy"] for name, seconds in times.items()}
    if device.type == "cuda":
        copies |= workspace(size, gradients)
    copies["copy"] = 1e3 * times["copy"]
    return copies


def decoding(size: int, gradients: list[Tensor]) -> dict[str, Job]:
    """Adding up the messages of 8 and of 32 ranks that chose by TopK."""
    selector = sw.TopK(0.01)
    segments = cut(selector, "ResNet-18", size)
    rank = Rank(selector, segments, gradients)
    taken = [rank.select() for _ in range(8)]
    messages = [(t.indices, t.values) for t in taken]
    flat = torch.empty(segments.size, device=gradients[0].device)
    kernel = kernels.on(flat.device)
    return {
        f"decode {count}": lambda all=messages * (count // 8): kernel.add_up(
            flat, all, 1 / 8, segments, rank.work
        )
        for count in (8, 32)
    }


def exchange_job(scheme: sw.Scheme, size: int, gradients: list[Tensor]) -> Job:
    """A rank's whole exchange but for the network: header, message, checksum, checks and all."""
    exchange = Exchange(scheme, cut(scheme.selector, "ResNet-18", size), 1)
    rank = Rank(scheme.selector, exchange.segments, gradients)
    flat, counters = rank.gradient().clone(), Counters()

    def once() -> None:
        flat[:1] = rank.step  # the mean of the last step is as good a gradient as any
        state = StepState(*({RESIDUAL: page} for page in rank.pages))
        run = exchange.run(flat, state, Call(rank.step, 0), counters, rank.work)
        finding = drive(run, sw.groups.Alone(), counters)
        status_of([finding], 0)  # which nobody waits for yet
        rank.pages.reverse()
        rank.step += 1

    return once


def exchanges(size: int, gradients: list[Tensor]) -> dict[str, Job]:
    """A whole exchange with every selector."""
    return {
        f"exchange {selector!r}": exchange_job(
            sw.Scheme(selector, collective=sw.AllGather()), size, gradients
        )
        for selector in SELECTORS
    }


def workspace(size: int, gradients: list[Tensor]) -> dict[str, float]:
    """Bytes per value on a GPU beyond gradient and memory: what the kernels keep between steps, and
    the most that a step and adding up eight messages take besides, their results included."""
    found = {}
    for selector in SELECTORS:
        rank = Rank(selector, cut(selector, "ResNet-18", size), gradients)
        flat = torch.empty(rank.segments.size, device=gradients[0].device)
        before = torch.cuda.memory_allocated()
        rank.select()
        kept = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        taken = rank.select()
        messages = [(taken.indices, taken.values)] * 8
        kernels.on(flat.device).add_up(flat, messages, 1 / 8, rank.segments, rank.work)
        most = torch.cuda.max_memory_allocated() - before - kept
        found[f"kept {selector!r}"] = kept / size
        found[f"besides {selector!r}"] = most / size
    return found


def show(size: int, found: Mapping[str, float], device: torch.device) -> None:
    page.say()
    page.say(f"{size / 1e6:g}M values, 1 %; one copy = {found['copy']:.3f} ms")
    page.say(f"  {'copies':<20} " + " ".join(f"{name:>12}" for name in CUTS) + "   floor")
    for selector in SELECTORS:
        cells = " ".join(f"{found[f'{selector!r} {name}']:12.2f}" for name in CUTS)
        page.say(f"  {selector!r:<20} {cells}   {found['deposit']:5.2f}")
    if "plain global" in found:
        cells = " ".join(f"{found[f'plain {name}']:12.2f}" for name in CUTS)
        page.say(f"  {'plain torch topk':<20} {cells}   {found['deposit']:5.2f}")
    page.say(
        f"  decode into the mean: {found['decode 8']:.2f} for 8 messages, "
        f"{found['decode 32']:.2f} for 32"
    )
    whole = ", ".join(f"{s!r} {found[f'exchange {s!r}']:.2f}" for s in SELECTORS)
    page.say(f"  whole exchange, layer-wise, without the network: {whole}")
    if device.type == "cuda":
        rows = (
            f"{s!r} {found[f'kept {s!r}']:.2f} + {found[f'besides {s!r}']:.2f}" for s in SELECTORS
        )
        page.say(f"  GPU workspace in bytes per value, kept + during a step: {', '.join(rows)}")


def judge(found: Mapping[str, float], kind: str) -> None:
    for selector in SELECTORS:
        limit = TARGETS[kind].get(type(selector).__name__)
        if limit is not None:
            page.target(f"{selector!r}, global", found[f"{selector!r} global"], limit, "copies")
    for selector in SELECTORS:
        for name in ("ResNet-18", "transformer"):
            ratio = found[f"{selector!r} {name}"] / found[f"{selector!r} global"]
            page.target(f"{selector!r}, {name} against global", ratio, LAYER_PENALTY, "times")
    for count, limit in zip((8, 32), DECODE_TARGETS[kind], strict=True):
        page.target(f"decode {count}", found[f"decode {count}"], limit, "copies")
    if kind == "cuda":
        for selector in (sw.Threshold(0.01), sw.TopK(0.01)):
            name = f"exchange {selector!r}"
            page.target(f"whole {name}", found[name], 3.0, "copies")


def plot(results: Mapping[int, Mapping[str, float]], *paths: Path) -> None:
    """Draw milliseconds against size on logarithmic axes: a straight line is a linear cost."""
    figure = drawing.blank(8, 5)
    axes = figure.subplots()
    rows = {repr(s): f"{s!r} global" for s in SELECTORS} | {"plain torch topk": "plain global"}
    for number, (label, name) in enumerate(rows.items(), start=1):
        sizes = [size for size in results if name in results[size]]
        times = [results[size][name] * results[size]["copy"] for size in sizes]
        axes.loglog(sizes, times, marker=MARKERS[number], color=OF_LINES[number], label=label)
    copies = [results[size]["copy"] for size in results]
    axes.loglog(list(results), copies, "--", color=OF_LINES[0], label="one copy")
    drawing.plain(axes, "Milliseconds to select 1 % of a gradient", "values in the gradient")
    axes.xaxis.set_major_formatter(lambda size, _: f"{size / 1e6:g} million")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)
    drawing.write(figure, *paths)


def redraw(stem: Path) -> None:
    """Draw the plot of results on file."""
    copies = json.loads(stem.with_suffix(".json").read_text())["copies"]
    results = {int(size): found for size, found in copies.items()}
    plot(results, stem.with_suffix(".png"), stem.with_suffix(".svg"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", type=float, nargs="+", help="values; default by device")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--save", action="store_true", help="write text, JSON and plot")
    parser.add_argument("--redraw", action="store_true", help="only plot the results on file")
    options = parser.parse_args()
    stem = options.out / f"encode-{options.device}"
    if options.redraw:
        redraw(stem)
        return
    device = torch.device(options.device)
    torch.set_num_threads(1)
    usual = [1e6, 11.17e6, 67e6] + ([268e6] if device.type == "cuda" else [])
    page.say(machine(device))
    results = {}
    for size in (round(number) for number in options.sizes or usual):
        with torch.no_grad():
            results[size] = measure(size, device, options.repeats)
        show(size, results[size], device)
    page.say()
    judged = round(SHOWN[device.type])
    if judged in results:
        page.say(f"Targets at {judged / 1e6:g}M")
        judge(results[judged], device.type)
    if options.save:
        page.save(stem.with_suffix(".txt"))
        content = {"schema": 1, "machine": machine(device), "copies": results}
        stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
        try:
            redraw(stem)
        except ImportError:
            page.say("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
