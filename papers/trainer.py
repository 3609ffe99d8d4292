"""One training with W simulated workers on one device.

The workers hold the same weights, so there is one model. In a step every worker's own batch goes
forward and backward through it, all of them together where its layers can keep them apart, which
gives W flat gradients; the exchange is that of real workers, with a memory for each; the optimizer
applies the mean once. Batch normalisation sees each worker's batch alone, as in DDP, and its
running statistics are those of worker 0, whose model is tested.

On CUDA all forward and backward passes of a step are one captured graph, and the exchange another.
The host waits for the device only when the test set is looked at.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import cast

import torch
from torch import Tensor, nn

from sparsewire.adapters.capture import Captured, new_stream
from sparsewire.adapters.simulation import Simulation
from sparsewire.report import dense_traffic, plural
from sparsewire.scheme import AnyScheme, Warmup

from . import together
from .clock import Clock
from .problems import Classes, Problem
from .recipe import Recipe

STREAMS = 4  # workers whose passes run side by side on a GPU if they are not one


@dataclass(frozen=True)
class Look:
    """What the problem found when it looked, and the mean training loss since the last time."""

    step: int
    epoch: float
    loss: float
    found: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """How a training went. Bytes are those of one worker in one step, `exchange_share` is how much
    of a step's time the exchange of all workers takes; None if there were too few steps to tell."""

    steps: int
    parameters: int
    sent: float
    received: float
    dense: float
    seconds: float
    exchange_share: float | None
    captured: bool
    diverged: bool
    flaw: str | None
    looks: tuple[Look, ...]

    def to_dict(self) -> dict[str, object]:
        """As JSON holds it, with the curves as lists."""
        fields = asdict(self)
        looks = [{**look.pop("found"), **look} for look in fields.pop("looks")]
        return {
            **self.looks[-1].found,
            **fields,
            "steps_per_second": self.steps / self.seconds if self.seconds else None,
            "curves": {name: [look.get(name) for look in looks] for name in looks[-1]},
        }


Steps = Generator[None, None, Outcome]


class Trainer:
    """Trains `problem` by `recipe` with `scheme`; weights, order and chance follow from `seed`."""

    def __init__(
        self,
        recipe: Recipe,
        scheme: AnyScheme,
        problem: Problem,
        seed: int,
        device: torch.device,
    ) -> None:
        self._recipe, self._problem, self._seed, self._device = recipe, problem, seed, device
        self._per_epoch = len(problem) // (recipe.workers * recipe.batch)
        if not self._per_epoch:
            raise ValueError(
                f"{plural(len(problem), 'example')} cannot fill one step of "
                f"{plural(recipe.workers, 'worker')} with {recipe.batch} each"
            )
        self.model = problem.build(seed).to(device)
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        self.simulation = Simulation(scheme, shapes, recipe.workers, device)
        self.weights = self._lay_out()
        self._crew = self._join()
        self._optimizer = self._make_optimizer()
        columns = problem.visit(seed, 0).shape[1]
        self._rows = torch.zeros(
            recipe.workers, recipe.batch, columns, dtype=torch.int64, device=device
        )
        self._worker_losses = torch.zeros(recipe.workers, device=device)
        self._losses = torch.zeros(self._per_epoch, device=device)
        self._stream = new_stream(device) if device.type == "cuda" else None
        self._clock = Clock(device, scheme.steps if isinstance(scheme, Warmup) else 0)
        self._passes = Captured(self._go_back_and_forth, device)
        is_apart = device.type == "cuda" and self._crew is None
        streams = min(STREAMS, recipe.workers) if is_apart else 0
        self._streams = [new_stream(device) for _ in range(streams)]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def run(self, tell: Callable[[Look], None]) -> Outcome:
        """Train to the end, or until numbers are no longer finite.

        Args:
            tell: called after every look at the test set.
        """
        steps = self.steps(tell)
        while True:
            try:
                self.go_on(steps)
            except StopIteration as end:
                return cast(Outcome, end.value)

    def go_on(self, steps: Steps) -> None:
        """Take one of the `steps`, on a stream of its own; raises StopIteration at the end."""
        with _precision(self._recipe), torch.cuda.stream(self._stream):
            next(steps)

    def steps(self, tell: Callable[[Look], None]) -> Steps:
        """The training step by step, so that several can take turns; returns its outcome."""
        recipe, looks = self._recipe, list[Look]()
        began, tested = time.perf_counter(), 0.0
        stops = {round(self._per_epoch * (n + 1) / recipe.looks) for n in range(recipe.looks)}
        diverged = False
        for epoch in range(recipe.epochs):
            if not recipe.warmup:
                self._set_rate(recipe.rate_at(epoch))
            rows, since = self._schedule(epoch), 0
            for step in range(self._per_epoch):
                self._step(rows[step], step)
                yield
                if step + 1 in stops:
                    losses = self._losses[since : step + 1].tolist()  # waits for the device
                    now = time.perf_counter()
                    look = self._look(epoch, step + 1, losses, now - began - tested)
                    tested += time.perf_counter() - now
                    looks.append(look)
                    tell(look)
                    since = step + 1
                    flaw = self.simulation.flaw
                    diverged = not math.isfinite(look.loss) or (
                        flaw is not None and flaw.is_non_finite
                    )
                    if diverged:
                        return self._outcome(looks, diverged)
        return self._outcome(looks, diverged)

    def _outcome(self, looks: Sequence[Look], diverged: bool) -> Outcome:
        simulation = self.simulation
        size, shares = simulation.segments.size, self._clock.shares()
        return Outcome(
            steps=simulation.step,
            parameters=size,
            sent=simulation.sent,
            received=simulation.received,
            dense=float(dense_traffic(size, self._recipe.workers, 4)),
            seconds=looks[-1].seconds,
            exchange_share=shares[1] if shares else None,
            captured=self._passes.is_captured and simulation.is_captured,
            diverged=diverged,
            flaw=None if simulation.flaw is None else str(simulation.flaw),
            looks=tuple(looks),
        )

    def _lay_out(self) -> nn.Parameter:
        """Move all parameters into one flat tensor, in the order of the exchange."""
        simulation = self.simulation
        flat = nn.Parameter(torch.empty_like(simulation.gradients[0]))
        named = dict(self.model.named_parameters())
        self._parameters, self._places = [], [list[Tensor]() for _ in simulation.gradients]
        with torch.no_grad():
            for span, view in simulation.segments.views(flat.data):
                place = view.view(span.shape)
                place.copy_(named[span.name])
                named[span.name].data = place
                self._parameters.append(named[span.name])
        for places, gradient in zip(self._places, simulation.gradients, strict=True):
            for span, view in simulation.segments.views(gradient):
                places.append(view.view(span.shape))
        flat.grad = simulation.gradients[0]
        return flat

    def _join(self) -> together.Crew | None:
        """Let all workers go through the model together, if it can tell them apart."""
        if not (isinstance(self._problem, Classes) and together.can_join(self.model)):
            return None
        pairs = zip(self._parameters, zip(*self._places, strict=True), strict=True)
        places: dict[Tensor, Tensor] = {one: together.places(each) for one, each in pairs}
        crew = together.Crew(self._recipe.workers, places)
        together.join(self.model, crew)
        return crew

    def _make_optimizer(self) -> torch.optim.Optimizer:
        recipe = self._recipe
        if recipe.optimizer == "adam":
            return torch.optim.Adam(
                [self.weights],
                lr=recipe.rate,
                betas=(0.9, 0.98),
                eps=1e-9,
                weight_decay=recipe.weight_decay,
                fused=True,
            )
        if recipe.optimizer == "adagrad":
            return torch.optim.Adagrad(
                [self.weights], lr=recipe.rate, weight_decay=recipe.weight_decay
            )
        return torch.optim.SGD(
            [self.weights],
            lr=recipe.rate,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            fused=True,
        )

    def _set_rate(self, rate: float) -> None:
        """Go on at another learning rate; what is kept back keeps its worth."""
        for group in self._optimizer.param_groups:
            if group["lr"] != rate:
                self.simulation.scale(group["lr"] / rate)
                group["lr"] = rate

    def _schedule(self, epoch: int) -> Tensor:
        """Every worker's rows of every step of an epoch."""
        rows = self._problem.visit(self._seed, epoch)[
            : self._per_epoch * self._rows[..., 0].numel()
        ]
        return rows.view(self._per_epoch, *self._rows.shape).to(self._device)

    def _step(self, rows: Tensor, number: int) -> None:
        self._clock.begin(self.simulation.step)
        self._rows.copy_(rows)
        self._passes()
        torch.mean(self._worker_losses, dim=0, out=self._losses[number])
        if self._recipe.warmup:
            rate = self._recipe.warm_rate(self.simulation.step)
            self._optimizer.param_groups[0]["lr"] = rate
        self._clock.mark()
        self.simulation.exchange()
        self._clock.mark()
        self._optimizer.step()
        self._clock.mark()

    def _go_back_and_forth(self) -> None:
        """Forward and backward of all workers, into their gradients."""
        inputs, labels = self._problem.batch(self._rows.flatten(0, 1))
        if self._crew is not None:
            with self._autocast():
                answers = self.model(inputs)
            losses = together.losses(answers, labels, self._recipe.workers)
            self._crew.differentiate(losses)
            self._worker_losses.copy_(losses.detach())
            return
        for worker in range(self._recipe.workers):
            mine = slice(worker * self._recipe.batch, (worker + 1) * self._recipe.batch)
            with self._aside(worker), _counting(self.model, worker == 0):
                with self._autocast():
                    loss = self._problem.loss(self.model(inputs[mine]), labels[mine])
                found = torch.autograd.grad(loss, self._parameters)
                torch._foreach_copy_(self._places[worker], found)
                self._worker_losses[worker].copy_(loss.detach())
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)

    @contextlib.contextmanager
    def _aside(self, worker: int) -> Iterator[None]:
        """On a GPU, go on on one of a few streams, which all begin where the current one is."""
        if not self._streams:
            yield
            return
        stream = self._streams[worker % len(self._streams)]
        if worker < len(self._streams):
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def _autocast(self) -> torch.autocast:
        is_on = self._recipe.precision == "bfloat16"
        return torch.autocast(self._device.type, torch.bfloat16, enabled=is_on)

    @torch.no_grad()
    def _look(self, epoch: int, step: int, losses: list[float], seconds: float) -> Look:
        """Test the weights as they are."""
        passed = epoch + step / self._per_epoch
        self.model.eval()
        with self._autocast():
            found = self._problem.look(self.model, passed)
        self.model.train()
        return Look(
            step=epoch * self._per_epoch + step,
            epoch=passed,
            loss=math.fsum(losses) / len(losses),
            found=found,
            seconds=seconds,
        )


def free(device: torch.device) -> None:
    """Give back what a training held that is over: graphs and their memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _precision(recipe: Recipe) -> Iterator[None]:
    """Products as precise as `recipe` says, and the fastest convolutions."""
    cudnn, is_exact = torch.backends.cudnn, recipe.precision == "float32"
    before = torch.get_float32_matmul_precision(), cudnn.benchmark, cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest" if is_exact else "high")
    cudnn.benchmark, cudnn.allow_tf32 = True, not is_exact
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.benchmark, cudnn.allow_tf32 = before[1:]


@contextlib.contextmanager
def _counting(model: nn.Module, counts: bool) -> Iterator[None]:
    """Whether batch normalisation takes this pass into its running statistics."""
    norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.track_running_stats = counts
    yield
    for norm in norms:
        norm.track_running_stats = True
