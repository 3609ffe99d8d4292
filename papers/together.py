"""All workers' batches in one pass: layers that compute a separate gradient for each worker.

Workers hold the same weights, so their batches can be joined to one that is W times as large, which
a GPU processes faster than W small ones. Two things must be computed per worker: the gradients of
the weights, and the statistics of batch normalisation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from sparsewire.adapters.capture import new_stream

from . import layers

SIDES = 3  # extra streams on a GPU for gradients of weights


class Crew:
    """W workers that share one pass: the rows of each worker, and the places of its gradients.

    Arguments:
        workers: The number of workers.
        places: For each parameter, the tensor of all workers' gradients, (worker, *shape).
    """

    def __init__(self, workers: int, places: Mapping[Tensor, Tensor]) -> None:
        self.workers, self._places = workers, places
        self._filled: set[Tensor] = set()
        device = next(iter(places.values())).device
        is_cuda = device.type == "cuda"
        self._sides = [new_stream(device) for _ in range(SIDES if is_cuda else 0)]
        self._turn = 0
        self._used: set[torch.cuda.Stream] = set()  # in this pass
        # Every layer depends on this token, so that autograd goes back to the first layer. The
        # gradients of weights are computed without autograd.
        self.token = torch.zeros((), device=device, requires_grad=True)

    def differentiate(self, losses: Tensor) -> None:
        """Write every worker's gradients of its loss to their places."""
        self._filled.clear()
        self._used.clear()
        torch.autograd.grad(losses.sum(), self.token, allow_unused=True)
        for side in self._used:  # a stream without work in this pass could not be captured
            torch.cuda.current_stream().wait_stream(side)

    def place(self, parameter: Tensor) -> Tensor:
        """Return the place of the workers' gradients of a parameter, once per pass."""
        if parameter in self._filled:
            raise ValueError("workers cannot share a pass through a layer that is used twice")
        self._filled.add(parameter)
        return self._places[parameter]

    def apart(self, rows: Tensor) -> Tensor:
        """Return the rows of a batch by worker: (worker, row, …)."""
        return rows.reshape(self.workers, -1, *rows.shape[1:])

    @contextlib.contextmanager
    def aside(self, *used: Tensor) -> Iterator[None]:
        """Run something on a second stream, with these tensors."""
        if not self._sides:
            yield
            return
        self._turn = (self._turn + 1) % len(self._sides)
        side = self._sides[self._turn]
        self._used.add(side)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield
        for tensor in used:
            tensor.record_stream(side)


def can_join(model: nn.Module) -> bool:
    """Return whether every layer with parameters is of a kind that `join` can replace."""
    return all(
        type(layer) in LAYERS and LAYERS[type(layer)].fits(layer)
        for layer in model.modules()
        if type(layer) in LAYERS or any(True for _ in layer.parameters(recurse=False))
    )


def join(model: nn.Module, crew: Crew) -> None:
    """Replace layers in place by layers that compute a separate gradient for each worker."""
    for layer in model.modules():
        if type(layer) in LAYERS:
            layer.__class__ = LAYERS[type(layer)]
            layer.crew = crew  # type: ignore[assignment]
    model.requires_grad_(False)


def _dtype(rows: Tensor) -> torch.dtype:
    """Return the type of matrix products, which autocast chooses."""
    kind = rows.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype


class _Convolution(nn.Conv2d):
    crew: Crew

    @staticmethod
    def fits(layer: Any) -> bool:
        """Return whether its options are supported here."""
        plain = layer.bias is None and layer.groups == 1 and layer.dilation == (1, 1)
        return plain and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)

    def forward(self, rows: Tensor) -> Tensor:
        if not self.training:
            return super().forward(rows)
        return cast(Tensor, _Convolve.apply(rows, self.crew.token, self))  # type: ignore[no-untyped-call]


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, layer: _Convolution) -> Tensor:
        rows = rows.to(_dtype(rows))
        weight = layer.weight.to(rows.dtype, memory_format=torch.channels_last)
        ctx.save_for_backward(rows, weight)
        ctx.layer = layer
        return functional.conv2d(rows, weight, None, layer.stride, layer.padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, None, None]:
        rows, weight = ctx.saved_tensors
        crew, layer = ctx.layer.crew, ctx.layer

        def gradient(of_what: int, rows: Tensor, slopes: Tensor) -> Tensor:
            how = layer.stride, layer.padding, (1, 1), False, (0, 0), 1
            mask = [number == of_what for number in range(3)]
            found = torch.ops.aten.convolution_backward(slopes, rows, weight, None, *how, mask)
            return cast(Tensor, found[of_what])

        each = zip(crew.apart(rows), crew.apart(slopes), crew.place(layer.weight), strict=True)
        for mine, my_slopes, place in each:
            with crew.aside(rows, slopes):
                layers.copy_weights(gradient(1, mine, my_slopes), place)
        return gradient(0, rows, slopes) if ctx.needs_input_grad[0] else None, None, None


class _Linear(nn.Linear):
    crew: Crew

    @staticmethod
    def fits(layer: Any) -> bool:
        """Return whether its options are supported here."""
        return layer.bias is not None

    def forward(self, rows: Tensor) -> Tensor:
        if not self.training:
            return super().forward(rows)
        return cast(Tensor, _Multiply.apply(rows, self.crew.token, self))  # type: ignore[no-untyped-call]


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, layer: _Linear) -> Tensor:
        rows = rows.to(_dtype(rows))
        weight, bias = layer.weight.to(rows.dtype), layer.bias.to(rows.dtype)
        ctx.save_for_backward(rows, weight)
        ctx.layer = layer
        return functional.linear(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, None, None]:
        rows, weight = ctx.saved_tensors
        layer: _Linear = ctx.layer
        crew = layer.crew
        mine, my_slopes = (crew.apart(each).flatten(1, -2) for each in (rows, slopes))
        crew.place(layer.weight).copy_(my_slopes.mT @ mine)
        crew.place(layer.bias).copy_(my_slopes.sum(dim=1))
        return slopes @ weight if ctx.needs_input_grad[0] else None, None, None


class _BatchNorm(nn.BatchNorm2d):
    crew: Crew

    @staticmethod
    def fits(layer: Any) -> bool:
        """Return whether its options are supported here."""
        return layer.affine and layer.track_running_stats and layer.momentum is not None

    def forward(self, rows: Tensor) -> Tensor:
        if not self.training:
            return super().forward(rows)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return cast(Tensor, _Normalise.apply(rows, self.crew.token, self))  # type: ignore[no-untyped-call]


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, layer: _BatchNorm) -> Tensor:
        result, moments = layers.forward(rows, layer, layer.crew.workers)
        ctx.save_for_backward(rows, moments)
        ctx.layer = layer
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None, None]:
        layer: _BatchNorm = ctx.layer
        gains, shifts = layer.crew.place(layer.weight), layer.crew.place(layer.bias)
        rows, moments = ctx.saved_tensors
        return layers.backward(slopes, rows, layer.weight, moments, gains, shifts), None, None


class _LayerNorm(nn.LayerNorm):
    crew: Crew

    @staticmethod
    def fits(layer: Any) -> bool:
        """Return whether its options are supported here."""
        plain = layer.elementwise_affine and layer.bias is not None
        return plain and len(layer.normalized_shape) == 1

    def forward(self, rows: Tensor) -> Tensor:
        if not self.training:
            return super().forward(rows)
        rows = functional.layer_norm(rows, self.normalized_shape, eps=self.eps)
        return cast(Tensor, _Scale.apply(rows, self.crew.token, self))  # type: ignore[no-untyped-call]


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, layer: _LayerNorm) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.layer = layer
        return torch.addcmul(layer.bias, rows, layer.weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        layer: _LayerNorm = ctx.layer
        crew = layer.crew
        crew.place(layer.weight).copy_(crew.apart(slopes * rows).flatten(1, -2).sum(dim=1))
        crew.place(layer.bias).copy_(crew.apart(slopes).flatten(1, -2).sum(dim=1))
        return slopes * layer.weight, None, None


LAYERS: dict[type[nn.Module], Any] = {
    nn.Conv2d: _Convolution,
    nn.Linear: _Linear,
    nn.BatchNorm2d: _BatchNorm,
    nn.LayerNorm: _LayerNorm,
}


def losses(answers: Tensor, labels: Tensor, workers: int) -> Tensor:
    """Return each worker's mean cross-entropy."""
    each = functional.cross_entropy(answers.float(), labels, reduction="none")
    return each.view(workers, -1).mean(dim=1)


def places(gradients: Sequence[Tensor]) -> Tensor:
    """Return several workers' gradients of one parameter, at equal distances, as one tensor."""
    first = gradients[0]
    step = (gradients[1].data_ptr() - first.data_ptr()) // 4 if len(gradients) > 1 else 0
    shape, strides = (len(gradients), *first.shape), (step, *first.stride())
    return first.as_strided(shape, strides)
