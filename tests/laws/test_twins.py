"""The library walks the same path as the papers' pseudocode in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import sparsewire as sw
from sparsewire.selectors import Selector
from sparsewire.workspace import Workspace

from . import problem, twins
from .cases import CPU, random_key

STEPS = 30
RATES = [0.2] * STEPS
DROP = [0.2] * 15 + [0.02] * 15
ALL = (slice(0, problem.SIZE),)


def assert_same_path(actual: twins.Array, expected: twins.Array) -> None:
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6)


def asked(scheme: sw.Scheme) -> twins.Choose:
    """Coordinates from the selector itself, for choices that are made by chance."""
    segments, work = scheme.partition(problem.SHAPES), Workspace()

    def choose(vector: twins.Array, worker: int, step: int) -> NDArray[np.int64]:
        return scheme.selector.coordinates(segments, random_key(step, worker), CPU, work).numpy()

    return choose


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("rates", [RATES, DROP], ids=["constant", "drop"])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_algorithm_1_with_top_k(scope: str, rates: list[float], workers: int) -> None:
    scheme = sw.Scheme(sw.TopK(0.12), scope=scope, dense_below=0, dense_1d=False)  # type: ignore[arg-type]
    choose = twins.largest(problem.LAYERS if scope == "layer" else ALL, 0.12)
    expected = twins.eghlidi_jaggi(problem.START, problem.gradient, choose, workers, rates)
    assert_same_path(problem.walk_simulated(scheme, workers, rates, inside=True), expected)
    for path in problem.walk_updates(scheme, workers, rates):
        assert_same_path(path, expected)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "selector",
    [
        sw.BlockRandomK(0.2),
        sw.BlockRandomK(0.2, shared=True),
        sw.RandomK(0.2),
        sw.RandomK(0.2, shared=False),
    ],
    ids=repr,
)
def test_algorithm_1_with_random_k(selector: Selector, workers: int) -> None:
    scheme = sw.Scheme(selector, dense_below=0, dense_1d=False)
    rates = [0.02] * STEPS
    expected = twins.eghlidi_jaggi(problem.START, problem.gradient, asked(scheme), workers, rates)
    assert_same_path(problem.walk_simulated(scheme, workers, rates, inside=True), expected)
    for path in problem.walk_updates(scheme, workers, rates):
        assert_same_path(path, expected)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("scope", ["layer", "global"], ids=["local", "global"])
@pytest.mark.parametrize("drop", [0.9, 0.8])
def test_gradient_dropping(drop: float, scope: str, workers: int) -> None:
    keep = round(1 - drop, 6)
    scheme = sw.Scheme(sw.Threshold(keep), scope=scope, dense_below=0, dense_1d=False)  # type: ignore[arg-type]
    layers = problem.LAYERS if scope == "layer" else ALL
    expected = twins.aji_heafield(problem.START, problem.gradient, layers, drop, workers, RATES)
    assert_same_path(problem.walk_simulated(scheme, workers, RATES), expected)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "memory",
    [
        sw.MomentumCorrection(0.7),
        sw.MomentumCorrection(0.7, nesterov=True),
        sw.MomentumCorrection(0.7, masking=False),
        sw.MomentumCorrection(0.7, nesterov=True, masking=False),
        sw.MomentumCorrection(0.7, clip=2.0),
        sw.MomentumCorrection(0.5, nesterov=True, clip=0.5),
    ],
    ids=repr,
)
def test_deep_gradient_compression(memory: sw.MomentumCorrection, workers: int) -> None:
    scheme = sw.Scheme(sw.TopK(0.12), memory=memory, dense_below=0, dense_1d=False)
    rates = [0.05] * STEPS
    expected = twins.deep_gradient_compression(
        problem.START,
        problem.gradient,
        twins.largest(problem.LAYERS, 0.12),
        workers,
        rates,
        problem.LAYERS,
        memory.momentum,
        memory.nesterov,
        memory.masking,
        memory.clip,
    )
    assert_same_path(problem.walk_simulated(scheme, workers, rates), expected)


def test_twins_tell_variants_apart() -> None:
    """The options that the tests above try do lead elsewhere, so that they test something."""

    def end(**options: object) -> twins.Array:
        return twins.deep_gradient_compression(
            problem.START,
            problem.gradient,
            twins.largest(problem.LAYERS, 0.12),
            3,
            [0.05] * STEPS,
            problem.LAYERS,
            0.7,
            **options,  # type: ignore[arg-type]
        )[-1]

    ends = [end(), end(nesterov=True), end(masking=False), end(clip=2.0)]
    for number, one in enumerate(ends):
        for other in ends[:number]:
            assert np.abs(one - other).max() > 0.01
