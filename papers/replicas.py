"""One training with W simulated workers that exchange updates.

Every worker has its own weights and optimizer. After a round of H steps the workers exchange the
changes of their weights, as `sparsewire.adapters.updates` does, and begin the next round at the
shared weights minus a share of their residuals. The optimizers are elementwise, so one optimizer
over the concatenated weights of all workers replaces W.

On CUDA all forward and backward passes of a step are one captured graph, and the exchange another.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sparsewire.adapters.capture import new_stream
from sparsewire.adapters.updates import PERIOD
from sparsewire.scheme import AnyScheme

from .problems import Problem
from .recipe import Recipe
from .training import STREAMS, Look, Outcome, Training


class Replicas(Training):
    """Trains with an exchange of updates. `shared` holds the weights that all workers share."""

    def __init__(
        self,
        recipe: Recipe,
        scheme: AnyScheme,
        problem: Problem,
        seed: int,
        device: torch.device,
    ) -> None:
        super().__init__(recipe, scheme, problem, seed, device)
        workers, segments = recipe.workers, self.simulation.segments
        self._models = [self.model, *(copy.deepcopy(self.model) for _ in range(workers - 1))]
        self.live = nn.Parameter(torch.empty(workers, segments.size, device=device))
        self.live.grad = torch.zeros_like(self.live)
        self._parameters: list[list[Tensor]] = []
        self._places: list[list[Tensor]] = []
        for model, row, slopes in zip(self._models, self.live.data, self.live.grad, strict=True):
            named, parameters = dict(model.named_parameters()), list[Tensor]()
            for span, view in segments.views(row):
                place = view.view(span.shape)
                place.copy_(named[span.name].detach())
                named[span.name].data = place
                parameters.append(named[span.name])
            self._parameters.append(parameters)
            self._places.append([view.view(span.shape) for span, view in segments.views(slopes)])
        self.shared = nn.Parameter(self.live.data[0].clone())
        self._start = self.live.data.clone()
        self._late: Tensor | None = None  # with delay=1, the mean update to apply in the next round
        self._ahead = torch.zeros((), device=device)
        self._motion = torch.zeros_like(self.shared) if recipe.drift else None
        self._flushes = 0
        if recipe.step_ahead != "auto":
            self._ahead.fill_(recipe.step_ahead)
        self._optimizer = self._make_optimizer(self.live)
        if recipe.decays_apart:
            for group in self._optimizer.param_groups:
                group["weight_decay"] = 0.0
        self._outer: torch.optim.Optimizer | None = None
        if recipe.outer_rate:
            self._outer = torch.optim.SGD(
                [self.shared],
                lr=recipe.outer_rate,
                momentum=recipe.outer_momentum,
                nesterov=recipe.outer_momentum > 0,
            )
        if device.type == "cuda":
            self._streams = [new_stream(device) for _ in range(min(STREAMS, workers))]
            assert self._stream is not None
            self._stream.wait_stream(torch.cuda.current_stream())

    @torch.no_grad()
    def _set_rate(self, rate: float) -> None:
        falls = rate <= self._optimizer.param_groups[0]["lr"] / 2
        if falls and self._recipe.flush and self.simulation.step:
            self._flush()
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def _flush(self) -> None:
        """Apply the mean of all residuals, as a dense exchange of them would."""
        self._apply(self._residuals().mean(dim=0))
        for rank in range(len(self._models)):
            self.simulation.residual(rank).zero_()
        self._start.copy_(self.shared)
        self.live.copy_(self._start)
        self._flushes += 1

    def _go_back_and_forth(self) -> None:
        """Run forward and backward of all workers, and write their gradients."""
        for worker, model in enumerate(self._models):
            self._pass(worker, model, self._parameters[worker], self._places[worker])
        self._come_together()

    @torch.no_grad()
    def _learn(self, step: int) -> None:
        self._optimizer.step()
        if _is_turn(step, self._recipe.share_moments):
            for state in self._optimizer.state.values():
                state["exp_avg_sq"].copy_(state["exp_avg_sq"].mean(dim=0))
        if (step + 1) % self._recipe.every:
            return
        simulation, number = self.simulation, self.simulation.step
        for mine, start, live in zip(simulation.gradients, self._start, self.live, strict=True):
            torch.sub(start, live, out=mine)
        updates = torch.stack(simulation.gradients) if self._recipe.delay else None
        before = self._residuals() if self._recipe.delay else None
        if self._recipe.step_ahead == "auto" and _is_due(number):
            self._measure()
        simulation.exchange()
        if _is_turn(step, self._recipe.share_residuals):
            common = self._residuals().mean(dim=0)
            for rank in range(len(self._models)):
                simulation.residual(rank).copy_(common)
        if self._recipe.decays_apart:
            rate = self._optimizer.param_groups[0]["lr"]
            self.shared.mul_(1 - rate * self._recipe.weight_decay)
        mean = simulation.gradients[0]
        if updates is None:
            self._apply(mean)
            torch.addcmul(self.shared, self._residuals(), -self._ahead, out=self._start)
            if self._motion is not None:
                self._motion.lerp_(mean, 0.01)
                self._start.sub_(self._motion, alpha=self._recipe.drift)
        else:
            if self._late is not None:
                self._apply(self._late)
            self._late = mean.clone()
            held = updates if before is None else before + updates
            torch.addcmul(self.shared, held, -self._ahead, out=self._start)
        self.live.copy_(self._start)

    def _residuals(self) -> Tensor:
        """Return the residuals of all workers."""
        return torch.stack([self.simulation.residual(rank) for rank in range(len(self._models))])

    def _apply(self, mean: Tensor) -> None:
        if self._outer is None:
            self.shared.sub_(mean)
        else:
            self.shared.grad = mean
            self._outer.step()

    def _measure(self) -> None:
        """Measure the share of the residuals that the workers have in common."""
        residuals = self._residuals()
        common = residuals.mean(dim=0).square().sum()
        self._ahead.copy_((common / residuals.square().sum(dim=1).mean()).nan_to_num(0.0))

    def _outcome(self, looks: Sequence[Look], diverged: bool) -> Outcome:
        """Return the outcome, and count averaged moments and residuals as dense traffic."""
        outcome, recipe = super()._outcome(looks, diverged), self._recipe
        periods = recipe.share_moments, recipe.share_residuals
        besides = sum(outcome.dense / period for period in periods if period)
        besides += outcome.dense * self._flushes / outcome.steps
        return replace(outcome, sent=outcome.sent + besides, received=outcome.received + besides)

    @torch.no_grad()
    def _look(self, epoch: int, step: int, losses: list[float], seconds: float) -> Look:
        """Test the shared weights; batch normalisation has the statistics of worker 0."""
        aside = self.live.data[0].clone()
        self.live.data[0] = self.shared
        look = super()._look(epoch, step, losses, seconds)
        self.live.data[0] = aside
        if self._recipe.step_ahead == "auto":
            look.found["step_ahead"] = float(self._ahead)
        return look


def _is_turn(step: int, period: int) -> bool:
    """Return whether a periodic action is due after this step. A period of 0 means never."""
    return period > 0 and (step + 1) % period == 0


def _is_due(number: int) -> bool:
    """Return whether to measure λ in a round, as in `sparsewire.adapters.updates`."""
    early = 0 < number < PERIOD and number & (number - 1) == 0
    return early or (number > 0 and number % PERIOD == 0)
