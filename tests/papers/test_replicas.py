"""Simulated workers with weights of their own train as ranks of the library do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import sparsewire as sw
from papers.problems import Mnist
from papers.recipe import Recipe
from papers.replicas import Replicas
from sparsewire.tools.tasks import mnist

from ..laws.meeting import Team, adamw, sgd
from .test_trainer import CPU, DATA

RECIPE = Recipe(
    problem="mnist",
    workers=3,
    batch=4,
    epochs=3,
    optimizer="sgd",
    rate=0.05,
    momentum=0.9,
    weight_decay=0.01,
    precision="float32",
    hidden=(20,),
    communicate="updates",
)
SPARSE = "Scheme(TopK(0.05), dense_below=100)"


def by_ranks(recipe: Recipe, scheme: str, seed: int) -> dict[str, Tensor]:
    """The same training by the library's own rounds."""
    model = mnist.build(recipe.hidden, seed, recipe.normalised)
    named = {name.replace(".", "-"): p for name, p in model.named_parameters()}
    values = {name: p.detach().clone() for name, p in named.items()}
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    per_epoch = len(DATA.train) // (recipe.workers * recipe.batch)

    def pull(weights: Tensor, rank: int, step: int) -> Tensor:
        epoch, inside = divmod(step, per_epoch)
        start = (inside * recipe.workers + rank) * recipe.batch
        rows = mnist.order(seed, epoch, len(DATA.train))[start : start + recipe.batch]
        images, labels = DATA.train.batch(rows)
        parts = weights.split([value.numel() for value in values.values()])
        named = {
            name.replace("-", "."): part.view(shapes[name]).requires_grad_()
            for name, part in zip(values, parts, strict=True)
        }
        loss = cross_entropy(functional_call(model, named, images), labels)
        return torch.cat([g.view(-1) for g in torch.autograd.grad(loss, list(named.values()))])

    make = sgd(recipe.rate, momentum=0.9, weight_decay=0.01)
    if recipe.optimizer == "adamw":
        make = adamw(recipe.rate, betas=(0.9, 0.95), weight_decay=0.01)
    outer = None
    if recipe.outer_rate:
        outer = sgd(recipe.outer_rate, momentum=recipe.outer_momentum, nesterov=True)
    team = Team(
        scheme,
        recipe.workers,
        make,
        every=recipe.every,
        shapes=shapes,
        values=values,
        pull=pull,
        outer=outer,
        step_ahead=recipe.step_ahead,
        is_delayed=bool(recipe.delay),
    )
    for _ in range(recipe.epochs * per_epoch // recipe.every):
        team.round()
    weights = team.first.updates.weights
    return {name.replace("-", "."): x for name, x in weights.values(weights.shared).items()}


def trained(recipe: Recipe, scheme: str, seed: int) -> dict[str, Tensor]:
    """The shared weights of the simulated training."""
    replicas = Replicas(recipe, sw.parse(scheme), Mnist(DATA, recipe), seed, CPU)
    replicas.run(lambda look: None)
    views = replicas.simulation.segments.views(replicas.shared.detach())
    return {span.name: view.view(span.shape) for span, view in views}


@pytest.mark.parametrize("scheme", [SPARSE, "Scheme(TopK(0.1), memory=ErrorFeedback(decay=0.9))"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "adamw", "rate": 1e-3},
        {"step_ahead": 0.5},
        {"every": 3, "step_ahead": 0.5},
        {"every": 2, "outer_rate": 0.7, "outer_momentum": 0.9},
        {"delay": 1, "step_ahead": 0.3},
    ],
    ids=str,
)
def test_the_same_as_ranks(changes: dict[str, Any], scheme: str) -> None:
    recipe = replace(RECIPE, **changes)
    expected = by_ranks(recipe, scheme, 7)
    for name, found in trained(recipe, scheme, 7).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-5)


def test_weight_decay_apart_is_exact() -> None:
    """Sent densely it makes no difference whether weights decay in the optimizer or apart."""
    recipe = replace(RECIPE, optimizer="adamw", rate=1e-2, weight_decay=0.5)
    inside = trained(recipe, "Dense()", 7)
    for name, found in trained(replace(recipe, decays_apart=True), "Dense()", 7).items():
        torch.testing.assert_close(found, inside[name], rtol=1e-4, atol=1e-6)
    sparse = trained(recipe, SPARSE, 7)
    apart = trained(replace(recipe, decays_apart=True), SPARSE, 7)
    assert any(not torch.allclose(apart[name], sparse[name], rtol=1e-3) for name in sparse)


def test_second_moments_and_residuals_are_averaged() -> None:
    steps = RECIPE.epochs * (len(DATA.train) // (RECIPE.workers * RECIPE.batch))
    recipe = replace(RECIPE, optimizer="adamw", share_moments=steps, share_residuals=steps)
    replicas = Replicas(recipe, sw.parse(SPARSE), Mnist(DATA, recipe), 0, CPU)
    outcome = replicas.run(lambda look: None)
    (state,) = replicas._optimizer.state.values()
    assert not torch.equal(state["exp_avg"][0], state["exp_avg"][1])
    residuals = [replicas.simulation.residual(rank) for rank in range(RECIPE.workers)]
    for rank in range(1, RECIPE.workers):
        assert torch.equal(state["exp_avg_sq"][rank], state["exp_avg_sq"][0])
        assert torch.equal(residuals[rank], residuals[0])
    assert residuals[0].any()
    # both are sent densely, once in the training
    besides = outcome.sent - replicas.simulation.sent
    assert besides == pytest.approx(2 * outcome.dense / steps)


def test_lambda_is_measured_and_told() -> None:
    recipe = replace(RECIPE, step_ahead="auto", epochs=6)
    replicas = Replicas(recipe, sw.parse(SPARSE), Mnist(DATA, recipe), 0, CPU)
    looks = replicas.run(lambda look: None).looks
    assert 0 < looks[-1].found["step_ahead"] <= 1


def test_the_shared_weights_are_tested() -> None:
    recipe = replace(RECIPE, step_ahead=0.5)
    replicas = Replicas(recipe, sw.parse(SPARSE), Mnist(DATA, recipe), 0, CPU)
    live = replicas.live.detach()
    last = replicas.run(lambda look: None).looks[-1]
    assert not torch.equal(live[0], replicas.shared)
    images, labels = DATA.test.batch(torch.arange(30))
    live[0] = replicas.shared.detach()
    with torch.no_grad():
        loss = cross_entropy(replicas.model(images), labels)
    assert last.found["test_loss"] == pytest.approx(float(loss), rel=1e-5)
