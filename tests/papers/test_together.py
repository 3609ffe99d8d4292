"""All workers in one pass: the gradients that each would have found alone."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from papers import layers, together

WORKERS, BATCH = 3, 4
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="see test_in_the_interpreter")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 6, 1, stride=2, bias=False),
        nn.BatchNorm2d(6),
        nn.Flatten(),
        nn.Linear(6 * 9, 20),
        nn.LayerNorm(20),
        nn.Linear(20, 5),
    )


def apart(net: nn.Module, images: Tensor, labels: Tensor) -> list[list[Tensor]]:
    """Every worker's gradients, and only the first one's batch in the running statistics."""
    found = []
    for worker in range(WORKERS):
        alone = net if worker == 0 else copy.deepcopy(net)
        mine = slice(worker * BATCH, (worker + 1) * BATCH)
        loss = cross_entropy(alone(images[mine]), labels[mine])
        found.append(list(torch.autograd.grad(loss, list(alone.parameters()))))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_keeps_workers_apart(dtype: torch.dtype) -> None:
    """As torch does it for one worker at a time, in float64."""
    generator = torch.Generator().manual_seed(2)
    rows, slopes = (
        torch.randn(WORKERS * BATCH, 6, 5, 5, generator=generator).to(
            dtype, memory_format=torch.channels_last
        )
        for _ in range(2)
    )
    norm = nn.BatchNorm2d(6)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5, generator=generator)
        norm.bias.uniform_(-1, 1, generator=generator)
    exact = copy.deepcopy(norm).double()
    found, moments = layers.forward(rows, norm, WORKERS)
    gains, shifts = torch.empty(WORKERS, 6), torch.empty(WORKERS, 6)
    back = layers.backward(slopes, rows, norm.weight, moments, gains, shifts)
    assert found.dtype == back.dtype == dtype
    bound = 0.02 if dtype == torch.bfloat16 else 1e-5
    for worker in range(WORKERS):
        mine = slice(worker * BATCH, (worker + 1) * BATCH)
        alone = exact if worker == 0 else copy.deepcopy(exact)
        given = rows[mine].double().requires_grad_()
        expected = alone(given)
        alike = torch.autograd.grad(
            expected, [given, alone.weight, alone.bias], slopes[mine].double()
        )
        ours = (found[mine], back[mine], gains[worker], shifts[worker])
        for one, other in zip(ours, (expected, *alike), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=bound, atol=bound)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(
            getattr(norm, name).double(), getattr(exact, name), rtol=bound, atol=bound
        )


def test_the_gradients_and_statistics_of_workers_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(WORKERS * BATCH, 2, 6, 6, generator=generator)
    labels = torch.randint(5, (WORKERS * BATCH,), generator=generator)
    alone, joined = model(), model()
    names = [name for name, _ in joined.named_parameters()]
    rows = {p: torch.zeros(WORKERS, *p.shape) for p in joined.parameters()}
    crew = together.Crew(WORKERS, rows)
    assert together.can_join(joined)
    together.join(joined, crew)
    assert [name for name, _ in joined.named_parameters()] == names
    losses = together.losses(joined(images), labels, WORKERS)
    crew.differentiate(losses)
    for worker, expected in enumerate(apart(alone, images, labels)):
        for name, place, gradient in zip(names, rows.values(), expected, strict=True):
            torch.testing.assert_close(
                place[worker], gradient, rtol=1e-4, atol=1e-5, msg=f"{name} of worker {worker}"
            )
    for ours, theirs in zip(joined.buffers(), alone.buffers(), strict=True):
        if ours.is_floating_point():
            torch.testing.assert_close(ours, theirs)
    joined.eval()
    alone.eval()
    torch.testing.assert_close(joined(images), alone(images))


@pytest.mark.parametrize(
    "layer",
    [
        nn.GRU(3, 3),
        nn.Conv2d(2, 2, 1),
        nn.Conv2d(2, 2, 3, padding="same", bias=False),
        nn.BatchNorm2d(3, affine=False),
        nn.LayerNorm((3, 3)),
    ],
    ids=["of another kind", "with a bias", "padding by name", "nothing to learn", "over two"],
)
def test_layers_that_are_not_known(layer: nn.Module) -> None:
    assert not together.can_join(nn.Sequential(layer, nn.ReLU()))


def test_places_of_several_workers_are_one_tensor() -> None:
    rows = torch.arange(24.0).view(3, 8)
    views = [row[2:6].view(2, 2) for row in rows]
    found = together.places(views)
    assert torch.equal(found, torch.stack(views))
    found[1] = -1.0
    assert torch.equal(rows[1, 2:6], torch.full((4,), -1.0))
    assert together.places(views[:1]).shape == (1, 2, 2)


@pytest.mark.slow  # an interpreter runs every program of every launch
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    IS_INTERPRETED or torch.cuda.is_available() or not find_spec("triton"),
    reason="is it, or runs for real",
)
def test_in_the_interpreter() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_rows_of_rows() -> None:
    """Of sentences, say: all but the last dimension are rows."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(24, 5))
    joined = copy.deepcopy(alone)
    images, labels = torch.randn(WORKERS * BATCH, 3, 6), torch.randint(5, (WORKERS * BATCH,))
    rows = {p: torch.zeros(WORKERS, *p.shape) for p in joined.parameters()}
    crew = together.Crew(WORKERS, rows)
    assert together.can_join(joined)
    together.join(joined, crew)
    crew.differentiate(together.losses(joined(images), labels, WORKERS))
    for worker, expected in enumerate(apart(alone, images, labels)):
        for place, gradient in zip(rows.values(), expected, strict=True):
            torch.testing.assert_close(place[worker], gradient)


def test_a_layer_that_is_used_twice_is_refused() -> None:
    layer = nn.Linear(4, 4)
    joined = nn.Sequential(layer, nn.ReLU(), layer)
    crew = together.Crew(2, {p: torch.zeros(2, *p.shape) for p in joined.parameters()})
    together.join(joined, crew)
    for _ in range(2):
        losses = together.losses(joined(torch.randn(6, 4)), torch.zeros(6, dtype=torch.long), 2)
        with pytest.raises(ValueError, match="used twice"):
            crew.differentiate(losses)


@interpreted
@pytest.mark.parametrize(
    ("workers", "rows", "channels", "side"), [(1, 8, 64, 8), (4, 4, 128, 5), (3, 70, 64, 2)]
)
@torch.no_grad()
def test_normalisation_by_triton(workers: int, rows: int, channels: int, side: int) -> None:
    from papers import layers_cuda

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(workers * rows, channels, side, side, generator=generator) * 2 + 1
    images = images.contiguous(memory_format=torch.channels_last)
    slopes = torch.randn(images.shape, generator=generator)
    found = []
    for module in (layers, layers_cuda):
        layer = nn.BatchNorm2d(channels)
        layer.weight.uniform_(0.5, 2, generator=torch.Generator().manual_seed(1))
        layer.bias.uniform_(-1, 1, generator=torch.Generator().manual_seed(2))
        result, moments = module.forward(images, layer, workers)
        gains, shifts = torch.zeros(2, workers, channels + 3)[..., :channels]
        back = module.backward(slopes, images, layer.weight, moments, gains, shifts)
        found.append([result, moments, back, gains, shifts, layer.running_mean, layer.running_var])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@interpreted
def test_weights_are_copied_in_another_order() -> None:
    from papers import layers_cuda

    weights = torch.randn(6, 64, 3, 3).contiguous(memory_format=torch.channels_last)
    place = torch.zeros(6, 64, 3, 3)
    layers_cuda.copy_weights(weights, place)
    assert torch.equal(place, weights)
