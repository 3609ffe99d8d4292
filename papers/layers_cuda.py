"""CUDA version of `layers`: `channels_last` memory, deterministic float32 sums."""
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from sparsewire.kernels.cuda.launch import run

CHANNELS = 64  # per program
ROWS = 64  # pixels read per iteration
PROGRAMS = 1056  # target number for reductions: eight per multiprocessor of a large GPU
BLOCK = 1024  # weights copied per program
PARTS = 32  # partial sums added per iteration


@triton.jit
def add_parts(
    rows, slopes, moments, parts, count, each, channels, workers,
    IS_BACK: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute partial sums over pixels: x and x² or, in the backward pass, dy and dy·x̂."""
    part, worker = tl.program_id(0), tl.program_id(1)
    own = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    lanes = tl.arange(0, ROWS)
    base = worker.to(tl.int64) * count
    if IS_BACK:
        mean = tl.load(moments + worker * channels + own)
        scale = tl.load(moments + (workers + worker) * channels + own)
    first = tl.zeros([ROWS, CHANNELS], tl.float32)
    second = tl.zeros([ROWS, CHANNELS], tl.float32)
    stop = tl.minimum(count, (part + 1) * each)
    for at in range(part * each, stop, ROWS):
        inside = (at + lanes < stop)[:, None]
        places = (base + at + lanes)[:, None] * channels + own[None, :]
        values = tl.load(rows + places, mask=inside, other=0).to(tl.float32)
        if IS_BACK:
            steep = tl.load(slopes + places, mask=inside, other=0).to(tl.float32)
            first += steep
            second += steep * (values - mean[None, :]) * scale[None, :]
        else:
            first += values
            second += values * values
    at = (part * workers + worker) * 2 * channels + own
    tl.store(parts + at, tl.sum(first, axis=0))
    tl.store(parts + at + channels, tl.sum(second, axis=0))


@triton.jit
def add_all(
    parts, many, worker, own, channels, workers, PARTS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Add up one worker's partial sums of both quantities."""
    first = tl.zeros([PARTS, CHANNELS], tl.float32)
    second = tl.zeros([PARTS, CHANNELS], tl.float32)
    for start in range(0, many, PARTS):
        part = start + tl.arange(0, PARTS)
        at = ((part * workers + worker) * 2 * channels)[:, None] + own[None, :]
        inside = (part < many)[:, None]
        first += tl.load(parts + at, mask=inside, other=0)
        second += tl.load(parts + at + channels, mask=inside, other=0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def finish_moments(
    parts, many, moments, mean_kept, variance_kept, count, channels, workers, eps, momentum,
    PARTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute every worker's mean and 1 / standard deviation. Worker 0 updates running moments."""
    worker = tl.program_id(0)
    own = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    first, second = add_all(parts, many, worker, own, channels, workers, PARTS, CHANNELS)
    mean = first / count
    variance = tl.maximum(second / count - mean * mean, 0.0)
    tl.store(moments + worker * channels + own, mean)
    tl.store(moments + (workers + worker) * channels + own, 1 / tl.sqrt(variance + eps))
    if worker == 0:
        kept = tl.load(mean_kept + own)
        tl.store(mean_kept + own, kept + momentum * (mean - kept))
        kept = tl.load(variance_kept + own)
        unbiased = variance * (count / (count - 1.0))
        tl.store(variance_kept + own, kept + momentum * (unbiased - kept))


@triton.jit
def finish_slopes(
    parts, many, gains, shifts, gains_step, shifts_step, channels, workers,
    PARTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute each worker's gradients of gain and shift."""
    worker = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    first, second = add_all(parts, many, worker, own, channels, workers, PARTS, CHANNELS)
    tl.store(shifts + worker * shifts_step + own, first)
    tl.store(gains + worker * gains_step + own, second)


@triton.jit
def normalise(
    rows, result, moments, gain, shift, count, channels, workers,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute y = gain · x̂ + shift."""
    worker = tl.program_id(1)
    own = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    lanes = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = (worker.to(tl.int64) * count + lanes)[:, None] * channels + own[None, :]
    inside = (lanes < count)[:, None]
    mean = tl.load(moments + worker * channels + own)
    scale = tl.load(moments + (workers + worker) * channels + own)
    values = tl.load(rows + places, mask=inside, other=0).to(tl.float32)
    plain = (values - mean[None, :]) * scale[None, :]
    found = tl.load(gain + own)[None, :] * plain + tl.load(shift + own)[None, :]
    tl.store(result + places, found.to(result.dtype.element_ty), mask=inside)


@triton.jit
def slope(
    rows, slopes, result, moments, gain, gains, shifts, gains_step, shifts_step,
    count, channels, workers, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute dx = gain / deviation · (dy − mean of dy − x̂ · mean of dy·x̂)."""
    worker = tl.program_id(1).to(tl.int64)
    own = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    lanes = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = (worker * count + lanes)[:, None] * channels + own[None, :]
    inside = (lanes < count)[:, None]
    mean = tl.load(moments + worker * channels + own)
    scale = tl.load(moments + (workers + worker) * channels + own)
    values = tl.load(rows + places, mask=inside, other=0).to(tl.float32)
    steep = tl.load(slopes + places, mask=inside, other=0).to(tl.float32)
    plain = (values - mean[None, :]) * scale[None, :]
    by_shift = tl.load(shifts + worker * shifts_step + own) / count
    by_gain = tl.load(gains + worker * gains_step + own) / count
    factor = tl.load(gain + own) * scale
    found = factor[None, :] * (steep - by_shift[None, :] - plain * by_gain[None, :])
    tl.store(result + places, found.to(result.dtype.element_ty), mask=inside)


@triton.jit
def reorder(source, target, size, INNER: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    """Reorder (…, tap, channel) to (…, channel, tap)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rest = at // TAPS
    place = (rest // INNER * TAPS + at % TAPS) * INNER + rest % INNER
    found = tl.load(source + place, mask=at < size, other=0)
    tl.store(target + at, found.to(target.dtype.element_ty), mask=at < size)


def copy_weights(found: Tensor, place: Tensor) -> None:
    found = found.contiguous(memory_format=torch.channels_last)
    inner, taps = found.shape[1], found.shape[2:].numel()
    grid = (-(-found.numel() // BLOCK),)
    run(reorder, grid, found, place, found.numel(), INNER=inner, TAPS=taps, BLOCK=BLOCK)


def forward(rows: Tensor, layer: nn.BatchNorm2d, workers: int) -> tuple[Tensor, Tensor]:
    rows = rows.contiguous(memory_format=torch.channels_last)
    work = _Work(rows, workers)
    moments = layer.weight.new_empty(2, workers, work.channels)
    parts = work.add_parts(rows, rows, moments, is_back=False)
    run(
        finish_moments,
        (workers, work.blocks),
        parts,
        len(parts),
        moments,
        layer.running_mean,
        layer.running_var,
        work.count,
        work.channels,
        workers,
        layer.eps,
        layer.momentum,
        PARTS=PARTS,
        CHANNELS=CHANNELS,
    )
    result = torch.empty_like(rows)
    sizes = work.count, work.channels, workers
    run(
        normalise,
        work.grid,
        rows,
        result,
        moments,
        layer.weight,
        layer.bias,
        *sizes,
        ROWS=ROWS,
        CHANNELS=CHANNELS,
    )
    return result, moments


def backward(
    slopes: Tensor, rows: Tensor, gain: Tensor, moments: Tensor, gains: Tensor, shifts: Tensor
) -> Tensor:
    slopes = slopes.contiguous(memory_format=torch.channels_last)
    rows = rows.contiguous(memory_format=torch.channels_last)
    workers = moments.shape[1]
    work = _Work(rows, workers)
    parts = work.add_parts(rows, slopes, moments, is_back=True)
    targets = gains, shifts, gains.stride(0), shifts.stride(0)
    run(
        finish_slopes,
        (workers, work.blocks),
        parts,
        len(parts),
        *targets,
        work.channels,
        workers,
        PARTS=PARTS,
        CHANNELS=CHANNELS,
    )
    result = torch.empty_like(slopes)
    sizes = work.count, work.channels, workers
    run(
        slope,
        work.grid,
        rows,
        slopes,
        result,
        moments,
        gain,
        *targets,
        *sizes,
        ROWS=ROWS,
        CHANNELS=CHANNELS,
    )
    return result


class _Work:
    """The division of one batch among programs."""

    def __init__(self, rows: Tensor, workers: int) -> None:
        number, self.channels, height, width = rows.shape
        self.workers = workers
        self.count = number // workers * height * width
        self.blocks = self.channels // CHANNELS
        self.grid = (-(-self.count // ROWS), workers, self.blocks)

    def add_parts(self, rows: Tensor, slopes: Tensor, moments: Tensor, is_back: bool) -> Tensor:
        wanted = max(1, PROGRAMS // (self.workers * self.blocks))
        each = ROWS * max(1, -(-self.count // (ROWS * wanted)))
        many = -(-self.count // each)
        parts = moments.new_empty(many, self.workers, 2, self.channels)
        run(
            add_parts,
            (many, self.workers, self.blocks),
            rows,
            slopes,
            moments,
            parts,
            self.count,
            each,
            self.channels,
            self.workers,
            IS_BACK=is_back,
            ROWS=ROWS,
            CHANNELS=CHANNELS,
        )
        return parts
