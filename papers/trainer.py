"""One training with W simulated workers that exchange gradients.

The workers hold the same weights, so there is one model. In a step, every worker's own batch goes
forward and backward through it, in one pass for all workers if the layers support that. This gives
W flat gradients, which are exchanged as between real workers, with a memory for each. The optimizer
applies the mean once. Batch normalisation sees each worker's batch alone, as in DDP, and has the
running statistics of worker 0.

On CUDA all forward and backward passes of a step are one captured graph, and the exchange another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sparsewire.adapters.capture import new_stream
from sparsewire.scheme import AnyScheme

from . import together
from .problems import Classes, Problem
from .recipe import Recipe
from .training import STREAMS, Training


class Trainer(Training):
    """Trains with an exchange of gradients."""

    def __init__(
        self,
        recipe: Recipe,
        scheme: AnyScheme,
        problem: Problem,
        seed: int,
        device: torch.device,
    ) -> None:
        super().__init__(recipe, scheme, problem, seed, device)
        self.weights = self._lay_out()
        self._crew = self._join()
        self._optimizer = self._make_optimizer(self.weights)
        is_apart = device.type == "cuda" and self._crew is None
        self._streams = [new_stream(device) for _ in range(min(STREAMS, recipe.workers) * is_apart)]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

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
        """Let all workers share one pass through the model, if its layers support that."""
        if not (isinstance(self._problem, Classes) and together.can_join(self.model)):
            return None
        pairs = zip(self._parameters, zip(*self._places, strict=True), strict=True)
        places: dict[Tensor, Tensor] = {one: together.places(each) for one, each in pairs}
        crew = together.Crew(self._recipe.workers, places)
        together.join(self.model, crew)
        return crew

    def _set_rate(self, rate: float) -> None:
        """Change the learning rate. If the recipe has drops, rescale the residuals to match."""
        for group in self._optimizer.param_groups:
            if group["lr"] != rate:
                if self._recipe.drops:
                    self.simulation.scale(group["lr"] / rate)
                group["lr"] = rate

    def _learn(self, step: int) -> None:
        self._clock.mark()
        self.simulation.exchange()
        self._clock.mark()
        self._optimizer.step()
        self._clock.mark()

    def _go_back_and_forth(self) -> None:
        """Run forward and backward of all workers, and write their gradients."""
        if self._crew is not None:
            inputs, labels = self._problem.batch(self._rows.flatten(0, 1))
            with self._autocast():
                answers = self.model(inputs)
            losses = together.losses(answers, labels, self._recipe.workers)
            self._crew.differentiate(losses)
            self._worker_losses.copy_(losses.detach())
            return
        for worker in range(self._recipe.workers):
            with _counting(self.model, worker == 0):
                self._pass(worker, self.model, self._parameters, self._places[worker])
        self._come_together()


@contextlib.contextmanager
def _counting(model: nn.Module, counts: bool) -> Iterator[None]:
    """Turn the running statistics of batch normalisation on or off."""
    norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.track_running_stats = counts
    yield
    for norm in norms:
        norm.track_running_stats = True
