"""A learning-rate drop: γ inside the memory, and a memory of gradients that is rescaled, agree."""

from __future__ import annotations

import numpy as np
import pytest

import sparsewire as sw

from . import problem

RATES = [0.2] * 15 + [0.02] * 10 + [0.1] * 5


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("selector", ["TopK(0.1)", "Threshold(0.1)", "BlockRandomK(0.5)"])
def test_both_forms_walk_the_same_path(selector: str, workers: int, scope: str) -> None:
    scheme = sw.parse(f"Scheme({selector}, scope={scope!r}, dense_below=0, dense_1d=False)")
    inside = problem.walk_updates(scheme, workers, RATES)[0]
    for path in (
        problem.walk_following(scheme, workers, RATES),
        problem.walk_simulated(scheme, workers, RATES, rescale=True),
        problem.walk_simulated(scheme, workers, RATES, inside=True),
    ):
        np.testing.assert_allclose(path, inside, atol=2e-6)


def test_without_rescaling_they_part_at_the_first_drop() -> None:
    scheme = sw.Scheme(sw.TopK(0.1), dense_below=0, dense_1d=False)
    inside = problem.walk_updates(scheme, 2, RATES)[0]
    left_alone = problem.walk_simulated(scheme, 2, RATES, rescale=False)
    np.testing.assert_allclose(left_alone[:15], inside[:15], atol=2e-6)
    assert np.abs(left_alone[15] - inside[15]).max() > 1e-3
    assert np.abs(left_alone[-1] - inside[-1]).max() > 1e-3
