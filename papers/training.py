"""The base class of trainings: the order of the data, learning rates, evaluations, the outcome."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import cast

import torch
from torch import Tensor, nn

from sparsewire.adapters.capture import Captured, new_stream
from sparsewire.adapters.simulation import Simulation
from sparsewire.report import dense_traffic, plural
from sparsewire.scheme import AnyScheme, Warmup

from .clock import Clock
from .problems import Problem
from .recipe import Recipe

STREAMS = 4  # streams for the workers' passes on a GPU, if they do not share one pass


@dataclass(frozen=True)
class Look:
    """The results of an evaluation, and the mean training loss since the last one."""

    step: int
    epoch: float
    loss: float
    found: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training.

    Bytes are per worker and step. `exchange_share` is the share of a step's time that the exchange
    of all workers takes, or None if there were too few steps to measure it.
    """

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
        """Return the outcome as values for JSON, with the curves as lists."""
        fields = asdict(self)
        looks = [{**look.pop("found"), **look} for look in fields.pop("looks")]
        return {
            **self.looks[-1].found,
            **fields,
            "steps_per_second": self.steps / self.seconds if self.seconds else None,
            "curves": {name: [look.get(name) for look in looks] for name in looks[-1]},
        }


Steps = Generator[None, None, Outcome]


class Training(ABC):
    """Trains `problem` by `recipe` with `scheme`. `seed` determines all random choices.

    On CUDA the host waits for the device only in evaluations.
    """

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
        columns = problem.visit(seed, 0).shape[1]
        self._rows = torch.zeros(
            recipe.workers, recipe.batch, columns, dtype=torch.int64, device=device
        )
        self._worker_losses = torch.zeros(recipe.workers, device=device)
        self._losses = torch.zeros(self._per_epoch, device=device)
        self._stream = new_stream(device) if device.type == "cuda" else None
        self._streams: list[torch.cuda.Stream] = []
        self._clock = Clock(device, scheme.steps if isinstance(scheme, Warmup) else 0)
        self._passes = Captured(self._go_back_and_forth, device)

    def run(self, tell: Callable[[Look], None]) -> Outcome:
        """Train to the end, or until numbers are no longer finite.

        Args:
            tell: Called after every evaluation.
        """
        steps = self.steps(tell)
        while True:
            try:
                self.go_on(steps)
            except StopIteration as end:
                return cast(Outcome, end.value)

    def go_on(self, steps: Steps) -> None:
        """Take one of the `steps` on the training's own stream. Raise StopIteration at the end."""
        with _precision(self._recipe), torch.cuda.stream(self._stream):
            next(steps)

    def steps(self, tell: Callable[[Look], None]) -> Steps:
        """Train step by step, so that several trainings can take turns. Return the outcome."""
        recipe, looks = self._recipe, list[Look]()
        began, tested = time.perf_counter(), 0.0
        stops = {round(self._per_epoch * (n + 1) / recipe.looks) for n in range(recipe.looks)}
        diverged, number = False, 0
        for epoch in range(recipe.epochs):
            rows, since = self._schedule(epoch), 0
            for step in range(self._per_epoch):
                self._clock.begin(number)
                self._rows.copy_(rows[step])
                self._set_rate(recipe.rate_at(number, self._per_epoch))
                self._passes()
                torch.mean(self._worker_losses, dim=0, out=self._losses[step])
                self._learn(number)
                number += 1
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

    @abstractmethod
    def _set_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""

    @abstractmethod
    def _go_back_and_forth(self) -> None:
        """Run forward and backward of all workers."""

    @abstractmethod
    def _learn(self, step: int) -> None:
        """Run the optimizers and the exchange, after the backward passes."""

    def _outcome(self, looks: Sequence[Look], diverged: bool) -> Outcome:
        simulation, steps = self.simulation, looks[-1].step
        size, shares = simulation.segments.size, self._clock.shares()
        return Outcome(
            steps=steps,
            parameters=size,
            sent=simulation.sent / self._recipe.every,
            received=simulation.received / self._recipe.every,
            dense=float(dense_traffic(size, self._recipe.workers, 4)),
            seconds=looks[-1].seconds,
            exchange_share=shares[1] if shares else None,
            captured=self._passes.is_captured and simulation.is_captured,
            diverged=diverged,
            flaw=None if simulation.flaw is None else str(simulation.flaw),
            looks=tuple(looks),
        )

    def _make_optimizer(self, weights: nn.Parameter) -> torch.optim.Optimizer:
        recipe = self._recipe
        rate, decay = recipe.rate, recipe.weight_decay
        if recipe.optimizer == "adam":
            return torch.optim.Adam(
                [weights], lr=rate, betas=(0.9, 0.98), eps=1e-9, weight_decay=decay, fused=True
            )
        if recipe.optimizer == "adamw":
            return torch.optim.AdamW(
                [weights], lr=rate, betas=(0.9, 0.95), weight_decay=decay, fused=True
            )
        if recipe.optimizer == "adagrad":
            return torch.optim.Adagrad([weights], lr=rate, weight_decay=decay)
        return torch.optim.SGD(
            [weights], lr=rate, momentum=recipe.momentum, weight_decay=decay, fused=True
        )

    def _schedule(self, epoch: int) -> Tensor:
        """Return the rows of every step of an epoch, for every worker."""
        rows = self._problem.visit(self._seed, epoch)[
            : self._per_epoch * self._rows[..., 0].numel()
        ]
        return rows.view(self._per_epoch, *self._rows.shape).to(self._device)

    def _pass(
        self, worker: int, model: nn.Module, parameters: Sequence[Tensor], places: Sequence[Tensor]
    ) -> None:
        """Run forward and backward of one worker, and write its gradients to their places."""
        mine = slice(worker * self._recipe.batch, (worker + 1) * self._recipe.batch)
        with self._aside(worker):
            inputs, labels = self._problem.batch(self._rows.flatten(0, 1)[mine])
            with self._autocast():
                loss = self._problem.loss(model(inputs), labels)
            found = torch.autograd.grad(loss, parameters)
            torch._foreach_copy_(list(places), found)
            self._worker_losses[worker].copy_(loss.detach())

    @contextlib.contextmanager
    def _aside(self, worker: int) -> Iterator[None]:
        """Switch to one of a few streams on a GPU, which all start after the current one."""
        if not self._streams:
            yield
            return
        stream = self._streams[worker % len(self._streams)]
        if worker < len(self._streams):
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def _come_together(self) -> None:
        """Make the current stream wait for the workers' streams."""
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)

    def _autocast(self) -> torch.autocast:
        is_on = self._recipe.precision == "bfloat16"
        return torch.autocast(self._device.type, torch.bfloat16, enabled=is_on)

    @torch.no_grad()
    def _look(self, epoch: int, step: int, losses: list[float], seconds: float) -> Look:
        """Evaluate the current weights."""
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
    """Free the graphs and the memory of a training that has ended."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _precision(recipe: Recipe) -> Iterator[None]:
    """Set the recipe's precision of matrix products, and choose the fastest convolutions."""
    cudnn, is_exact = torch.backends.cudnn, recipe.precision == "float32"
    before = torch.get_float32_matmul_precision(), cudnn.benchmark, cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest" if is_exact else "high")
    cudnn.benchmark, cudnn.allow_tf32 = True, not is_exact
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.benchmark, cudnn.allow_tf32 = before[1:]
