"""Elastic training in short; `make chaos` ends with ten rounds of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsewire as sw

from . import elastic
from .elastic_worker import BATCH, examples, final_loss, make_net


@pytest.mark.slow  # agents of torchrun take seconds to find each other
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("elastic")
def test_training_goes_on_with_other_ranks() -> None:
    """Agents die and join. The loss is that of four workers that were never disturbed."""
    steps, loss, lost = elastic.finish([2, 1, 3])
    assert lost <= elastic.CONSERVED
    assert loss == pytest.approx(_undisturbed(steps), rel=0.1)


def _undisturbed(steps: int) -> float:
    net, workers = make_net(), 4
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    state = sw.functional.init("TopK(0.05)", dict(net.named_parameters()))
    states, share = [state] * workers, BATCH // workers
    for step in range(steps):
        gradients = []
        for rank in range(workers):
            net.zero_grad()
            inputs, targets = examples(step, rank * share, share)
            nn.functional.cross_entropy(net(inputs), targets).backward()
            gradients.append({n: p.grad.clone() for n, p in net.named_parameters()})
        mean, states = sw.functional.simulate(gradients, states)
        for name, parameter in net.named_parameters():
            parameter.grad = mean[name]
        optimizer.step()
    return final_loss(net)
