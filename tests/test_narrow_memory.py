"""Memory in bfloat16: half the space, rounded at random, right on average."""

from __future__ import annotations

import pytest
import torch

import sparsewire as sw
from sparsewire.kernels import reference

from .laws.cases import Crew, named_noise, noise

NARROW = sw.ErrorFeedback(dtype="bfloat16")
SCHEME = sw.Scheme(sw.TopK(0.1), memory=NARROW, dense_below=64)


def test_rounding_is_right_on_average() -> None:
    wide = torch.tensor([1.0, 1.001, -3.14159, 1e-30, 0.0, -0.0, 65280.5])
    total = torch.zeros(7, dtype=torch.float64)
    seen: list[set[float]] = [set() for _ in wide]
    for key in range(4000):
        narrow = torch.empty(7, dtype=torch.bfloat16)
        reference.narrow(wide, narrow, key)
        total += narrow.double()
        for values, value in zip(seen, narrow.tolist(), strict=True):
            values.add(value)
    assert [len(values) for values in seen] == [1, 2, 2, 2, 1, 1, 2]
    mean, step = total / 4000, wide.double().abs() * 2**-7
    assert ((mean - wide.double()).abs() <= 4.5 * step / 2 / 4000**0.5).all()


def test_what_is_bfloat16_already_stays_and_nothing_overflows() -> None:
    exact = torch.randn(1001).bfloat16()
    most = torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
    for key in range(20):
        narrow = torch.empty(1001, dtype=torch.bfloat16)
        reference.narrow(exact.float(), narrow, key)
        assert torch.equal(narrow, exact)
        ends = torch.empty(2, dtype=torch.bfloat16)
        reference.narrow(most, ends, key)
        assert ends.isfinite().all()


@pytest.mark.parametrize("selector", [sw.TopK(0.1), sw.RandomK(0.1), sw.Threshold(0.1)])
def test_nothing_is_lost_but_rounding(selector: sw.Selector) -> None:
    shapes = {"w": (40, 50), "b": (7,)}
    crew = Crew(sw.Scheme(selector, memory=NARROW, dense_below=64), 2, shapes)
    accumulated, applied = torch.zeros(crew.size).double(), torch.zeros(crew.size).double()
    for step in range(20):
        gradients = noise(2, crew.size, step)
        accumulated += sum(g.double() for g in gradients)
        applied += 2 * crew.exchange(gradients)[0].double()
    lost = accumulated - applied - crew.owed()
    assert 1e-4 < lost.norm() / accumulated.norm() < 0.02
    assert abs(lost.mean()) < 4.5 * lost.std() / crew.size**0.5  # to no side


def test_memory_takes_half_the_space_and_is_saved_as_it_is() -> None:
    shapes = {"w": (40, 50), "b": (7,)}
    gradients = [named_noise(shapes, rank) for rank in range(2)]
    states = [sw.functional.init(SCHEME, gradients[0]) for _ in range(2)]
    mean, states = sw.functional.simulate(gradients, states)
    assert mean["w"].dtype == torch.float32
    assert states[0].memory["w"]["residual"].dtype == torch.bfloat16
    wide = sw.explain(sw.Scheme(sw.TopK(0.1), dense_below=64), shapes, 2).memory_bytes
    assert sw.explain(SCHEME, shapes, 2).memory_bytes * 2 == wide


def test_double_precision_keeps_its_memory() -> None:
    gradients = {"w": torch.randn(40, 50, dtype=torch.float64)}
    state = sw.functional.init(SCHEME, gradients)
    _, state = sw.functional.exchange(gradients, state, sw.groups.Alone())
    assert state.memory["w"]["residual"].dtype == torch.float64


@pytest.mark.parametrize("kind", [sw.ErrorFeedback, sw.MomentumCorrection])
def test_other_types_are_refused(kind: type[sw.Memory]) -> None:
    with pytest.raises(
        sw.errors.SchemeError, match="dtype must be 'float32' or 'bfloat16', not 'float16'"
    ):
        kind(dtype="float16")  # type: ignore[call-arg]
