"""The papers' algorithms in NumPy, written from their pseudocode and knowing nothing of src/.

`gradient(x, worker, step)` is a worker's gradient; `choose(vector, worker, step)` says which of a
vector's coordinates are sent. All of them return the positions after every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Gradient = Callable[[Array, int, int], Array]
Choose = Callable[[Array, int, int], NDArray[np.int64]]
Layers = Sequence[slice]


def largest(layers: Layers, ratio: float) -> Choose:
    """Top-k by magnitude of every layer, k = max(1, ceil(ratio · n))."""

    def choose(vector: Array, worker: int, step: int) -> NDArray[np.int64]:
        chosen = []
        for layer in layers:
            part = np.abs(vector[layer])
            k = max(1, math.ceil(ratio * len(part)))
            chosen.append(layer.start + np.argsort(-part, kind="stable")[:k])
        return np.concatenate(chosen)

    return choose


def eghlidi_jaggi(
    x: Array, gradient: Gradient, choose: Choose, workers: int, rates: Sequence[float]
) -> Array:
    """Algorithm 1 of Eghlidi & Jaggi 2020: γ inside the memory, own q subtracted, mean applied."""
    memory = np.zeros((workers, len(x)), np.float32)
    path = []
    for step, rate in enumerate(rates):
        sent = np.zeros_like(memory)
        for w in range(workers):
            p = np.float32(rate) * gradient(x, w, step) + memory[w]
            at = choose(p, w, step)
            sent[w, at] = p[at]
            memory[w] = p - sent[w]
        x = x - sent.mean(axis=0)
        path.append(x)
    return np.stack(path)


def aji_heafield(
    x: Array,
    gradient: Gradient,
    layers: Layers,
    drop: float,
    workers: int,
    rates: Sequence[float],
) -> Array:
    """GradDrop of Aji & Heafield 2017 with a local threshold per layer, or one layer for all."""
    residual = np.zeros((workers, len(x)), np.float32)
    path = []
    for step, rate in enumerate(rates):
        sent = np.zeros_like(residual)
        for w in range(workers):
            total = gradient(x, w, step) + residual[w]
            for layer in layers:
                size = np.abs(total[layer])
                threshold = np.sort(size)[round(drop * len(size)) - 1]
                sent[w, layer] = np.where(size > threshold, total[layer], 0)
            residual[w] = total - sent[w]
        x = x - np.float32(rate) * sent.mean(axis=0)
        path.append(x)
    return np.stack(path)


def deep_gradient_compression(
    x: Array,
    gradient: Gradient,
    choose: Choose,
    workers: int,
    rates: Sequence[float],
    layers: Layers,
    momentum: float,
    nesterov: bool = False,
    masking: bool = True,
    clip: float | None = None,
) -> Array:
    """Momentum correction, factor masking and local clipping of Lin et al. 2018."""
    m = np.float32(momentum)
    u = np.zeros((workers, len(x)), np.float32)
    v = np.zeros_like(u)
    path = []
    for step, rate in enumerate(rates):
        sent = np.zeros_like(u)
        for w in range(workers):
            g = gradient(x, w, step)
            if clip is not None:
                for layer in layers:
                    norm = float(np.linalg.norm(g[layer]))
                    g[layer] *= np.float32(min(1.0, clip / math.sqrt(workers) / norm))
            if nesterov:
                u[w] = m * (u[w] + g)
                v[w] += u[w] + g
            else:
                u[w] = m * u[w] + g
                v[w] += u[w]
            at = choose(v[w], w, step)
            sent[w, at] = v[w, at]
            v[w, at] = 0
            if masking:
                u[w, at] = 0
        x = x - np.float32(rate) * sent.mean(axis=0)
        path.append(x)
    return np.stack(path)


Local = Callable[[Array, Array], Array]  # weights and gradient to weights


def adamw(rate: float, decay: float = 0.01, first: float = 0.9, second: float = 0.999) -> Local:
    """AdamW of Loshchilov & Hutter 2019 with its own moments."""
    m, v, t = np.float64(0), np.float64(0), 0

    def step(x: Array, g: Array) -> Array:
        nonlocal m, v, t
        t += 1
        m = first * m + (1 - first) * g
        v = second * v + (1 - second) * g * g
        ahead, size = m / (1 - first**t), v / (1 - second**t)
        moved = x * (1 - rate * decay) - rate * ahead / (np.sqrt(size) + 1e-8)
        return moved.astype(np.float32)

    return step


def sgd(rate: float, momentum: float = 0.0, nesterov: bool = False) -> Local:
    """SGD with momentum, as of Sutskever et al. 2013 in the form that frameworks use."""
    u: Array | float = 0.0

    def step(x: Array, g: Array) -> Array:
        nonlocal u
        u = np.float32(momentum) * u + g
        return x - np.float32(rate) * (g + np.float32(momentum) * u if nesterov else u)

    return step


def local_updates(
    x: Array,
    gradient: Gradient,
    choose: Choose,
    locals_: Sequence[Local],
    outer: Local,
    rounds: int,
    every: int,
    decay: float = 1.0,
    ahead: float = 0.0,
) -> Array:
    """SparseLoCo of Sarfi et al. 2025; if all is chosen, DiLoCo of Douillard et al. 2023.

    With `ahead` a worker begins a round at x − λ·e, the step-ahead of Redie et al. 2026.
    """
    memory = np.zeros((len(locals_), len(x)), np.float32)
    path = []
    for round_ in range(rounds):
        sent = np.zeros_like(memory)
        for w, local in enumerate(locals_):
            begun = x - np.float32(ahead) * memory[w]
            theta = begun
            for h in range(every):
                theta = local(theta, gradient(theta, w, round_ * every + h))
            memory[w] += begun - theta
            at = choose(memory[w], w, round_)
            sent[w, at] = memory[w, at]
            memory[w, at] = 0
            memory[w] *= np.float32(decay)
        x = outer(x, sent.mean(axis=0))
        path.append(x)
    return np.stack(path)
