"""Zeros, NaN and infinities, k ≥ n, empty and tiny tensors, other float types, huge values."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import sparsewire as sw
from sparsewire.codecs import ValueCodec
from sparsewire.collectives import Collective
from sparsewire.memory import Memory
from sparsewire.selectors import Selector, Sized
from sparsewire.state import RESIDUAL

from .cases import (
    EPS,
    SAMPLE,
    SCHEMES,
    SHAPES,
    WHOLE,
    Crew,
    dense,
    examples,
    label,
    named_noise,
    noise,
    owed_by,
    within,
)

BAD = [math.nan, math.inf, -math.inf]
LAYERED = [s for s in SCHEMES if s.scope == "layer" and s.values == sw.Float32()]
TINY: dict[str, dict[str, tuple[int, ...]]] = {
    "0-dim": {"x": ()},
    "one element": {"x": (1,)},
    "one by one": {"x": (1, 1)},
    "empty": {"x": (0,)},
    "empty matrix": {"x": (3, 0)},
    "empty between": {"a": (2, 2), "x": (0, 4), "b": (5,)},
}


@pytest.mark.parametrize("scheme", SAMPLE, ids=label)
def test_zeros_stay_zeros(scheme: sw.Scheme) -> None:
    crew = Crew(scheme)
    for _ in range(2):
        means = crew.exchange([torch.zeros(crew.size)] * 2)
        assert not torch.stack(means).any()
    assert not crew.owed().any()


@pytest.mark.parametrize("memory", examples("memory"), ids=label)
@pytest.mark.parametrize(
    ("selector", "bad"),
    list(zip(examples("selectors"), itertools.cycle(BAD), strict=False)),
    ids=label,
)
def test_unsound_numbers_never_enter_the_memory(
    selector: Selector, bad: float, memory: Memory
) -> None:
    crew = Crew(sw.Scheme(selector, memory=memory, dense_below=WHOLE), 3)
    crew.exchange(noise(3, crew.size, 0))
    kept = [store.state_dict() for store in crew.stores]
    gradients = noise(3, crew.size, 1)
    spoilt = [gradient.clone() for gradient in gradients]
    place = next(param for param in crew.segments.params if param.name == "matrix")
    spoilt[1][place.start + 17] = bad

    _, status = crew.attempt(spoilt)
    assert status is not None
    assert dict(status.parameters) == {1: "matrix"}
    for store, state in zip(crew.stores, kept, strict=True):
        now = store.state_dict()
        for name, fields in state.items():
            assert all(torch.equal(now[name][field], fields[field]) for field in fields)

    # and the next sound step is the one that would have come anyway
    undisturbed = Crew(crew.scheme, 3)
    undisturbed.exchange(noise(3, crew.size, 0))
    assert torch.equal(crew.exchange(gradients)[0], undisturbed.exchange(gradients)[0])


@pytest.mark.parametrize("bad", BAD)
def test_error_names_ranks_and_first_parameters(bad: float) -> None:
    gradients = [named_noise(SHAPES, rank) for rank in range(3)]
    gradients[0]["single"][0, 0] = bad
    gradients[2]["bias"][3] = bad
    gradients[2]["matrix"][1, 1] = bad
    states = [sw.functional.init("TopK(0.1)", gradients[0]) for _ in range(3)]
    with pytest.raises(
        sw.errors.NonFiniteError, match=r"step 0: rank 0 in single; rank 2 in bias; the"
    ):
        sw.functional.simulate(gradients, states)


def test_opposite_infinities_do_not_cancel() -> None:
    crew = Crew("Dense()", 2, {"x": (2,)})
    _, status = crew.attempt([torch.tensor([math.inf, 0]), torch.tensor([-math.inf, 0])])
    assert status is not None
    assert set(status.parameters) == {0, 1}


@pytest.mark.parametrize("scheme", LAYERED, ids=label)
@pytest.mark.parametrize("limit", [None, 1024])
def test_tiny_tensors(scheme: sw.Scheme, limit: int | None) -> None:
    chosen = sw.Scheme(scheme.selector, collective=scheme.collective, **dense(limit))
    for title, shapes in TINY.items():
        gradients = [named_noise(shapes, rank) for rank in range(2)]
        mean, states = sw.functional.simulate(
            gradients, [sw.functional.init(chosen, gradients[0]) for _ in range(2)]
        )
        for name, shape in shapes.items():
            assert mean[name].shape == shape
            accumulated = gradients[0][name].double() + gradients[1][name].double()
            owed = owed_by(states, name)
            assert within(2 * mean[name] + owed, accumulated, 1e-5), title
            if math.prod(shape) <= 1:
                assert not torch.as_tensor(owed).any(), title


@pytest.mark.parametrize(
    "selector", [s for s in examples("selectors") if hasattr(s, "count")], ids=label
)
@pytest.mark.parametrize("count", [9, 10, 11, 10_000])
def test_counts_at_and_beyond_the_length(selector: Sized, count: int) -> None:
    scheme = sw.Scheme(
        replace(selector, ratio=None, count=count, min_count=1), dense_below=0, dense_1d=False
    )
    crew = Crew(scheme, 2, {"x": (2, 5)})
    gradients = noise(2, 10, 0)
    mean = crew.exchange(gradients)[0]
    if count >= 10 or not crew.segments.sparse:  # as many blocks as hold nine
        assert within(mean, (gradients[0] + gradients[1]) / 2, 4 * EPS * 10)
        assert not crew.owed().any()
    elif not scheme.selector.coordination.is_shared:
        assert crew.remembered(0).count_nonzero() <= 1
    elif hasattr(selector, "block"):  # three blocks of three, or two and one of one
        assert mean.count_nonzero() in (7, 9)
    elif selector.proposers == "all":  # five of one rank and four of the other
        assert 5 <= mean.count_nonzero() <= 9
    else:
        assert mean.count_nonzero() == 9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scheme", LAYERED, ids=label)
def test_other_float_types(scheme: sw.Scheme, dtype: torch.dtype) -> None:
    """Memory is kept in float32 at least; gradients come back in the type they had."""
    world_size = 3
    states = [sw.functional.init(scheme, named_noise(SHAPES, 0, dtype)) for _ in range(world_size)]
    kept_dtype = torch.promote_types(dtype, torch.float32)
    accumulated = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
    applied = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
    for step in range(3):
        gradients = [named_noise(SHAPES, 10 * step + rank, dtype) for rank in range(world_size)]
        mean, states = sw.functional.simulate(gradients, states)
        for name in SHAPES:
            assert mean[name].dtype == dtype
            accumulated[name] += sum(g[name].double() for g in gradients)
            applied[name] += world_size * mean[name].double()
    for name in SHAPES:
        assert all(state.memory[name][RESIDUAL].dtype == kept_dtype for state in states)
        owed = owed_by(states, name)
        rounding = 50 * max(torch.finfo(dtype).eps, torch.finfo(torch.float64).eps)
        assert within(applied[name] + owed, accumulated[name], rounding)


def test_mixed_float_types_in_one_model() -> None:
    gradients = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(3, dtype=torch.float64)}
    mean, states = sw.functional.simulate([gradients], [sw.functional.init("Dense()", gradients)])
    assert {name: g.dtype for name, g in mean.items()} == {n: g.dtype for n, g in gradients.items()}
    assert torch.equal(mean["a"], gradients["a"])
    assert torch.equal(mean["b"], gradients["b"])
    assert states[0].step == 1


@pytest.mark.parametrize("scheme", LAYERED, ids=label)
def test_finite_gradients_pass_though_their_norm_overflows(scheme: sw.Scheme) -> None:
    crew = Crew(scheme, 2)
    gradients = [1e30 * gradient.clamp(-10, 10) for gradient in noise(2, crew.size, 0)]
    assert gradients[0].norm().isinf()
    mean = crew.exchange(gradients)[0]
    assert mean.isfinite().all()
    total = gradients[0].double() + gradients[1].double()
    scale = gradients[0].double().abs() + gradients[1].double().abs()
    assert within(2 * mean.double() + crew.owed(), total, 8 * EPS * scale)


@pytest.mark.parametrize("selector", examples("selectors"), ids=label)
def test_subnormal_gradients_pass(selector: Selector) -> None:
    crew = Crew(sw.Scheme(selector, dense_below=WHOLE), 2)
    tiny = torch.full((crew.size,), 1e-40)
    mean = crew.exchange([tiny, tiny])[0]
    assert within(2 * mean.double() + crew.owed(), 2 * tiny, 1e-44)


def test_sums_that_overflow_do_not_enter_the_memory() -> None:
    crew = Crew(sw.Scheme(sw.TopK(count=1), dense_below=0, dense_1d=False), 1, {"x": (4,)})
    statuses = [crew.attempt([torch.full((4,), 3e38)])[1] for _ in range(3)]
    assert crew.remembered(0).isfinite().all()
    assert statuses[0] is None
    assert statuses[-1] is not None


@pytest.mark.parametrize("codec", examples("values"), ids=label)
def test_sums_that_overflow_are_not_taken_either(codec: ValueCodec) -> None:
    """The second coordinate overflows in the second step, and is the one that is taken."""
    crew = Crew(
        sw.Scheme(sw.TopK(count=1), values=codec, dense_below=0, dense_1d=False), 1, {"x": (4,)}
    )
    crew.attempt([torch.tensor([3.3e38, 3e38, 0, 0])])
    _, status = crew.attempt([torch.tensor([0, 3e38, 0, 0])])
    assert status is not None
    assert crew.remembered(0).isfinite().all()


def test_momentum_that_overflows_later_is_not_taken() -> None:
    """A huge gradient is held back; its momentum overflows in the next step, which brings none."""
    scheme = sw.Scheme(
        sw.TopK(count=1), memory=sw.MomentumCorrection(0.9), dense_below=0, dense_1d=False
    )
    crew = Crew(scheme, 1, {"x": (4,)})
    crew.attempt([torch.tensor([3.3e38, 3e38, 0, 0])])
    _, status = crew.attempt([torch.zeros(4)])
    assert status is not None


@pytest.mark.parametrize("collective", examples("collectives"), ids=label)
def test_means_do_not_overflow(collective: Collective) -> None:
    crew = Crew(sw.Scheme(sw.Dense(), collective=collective), 2, {"x": (4,)})
    mean = crew.exchange([torch.full((4,), 3e38)] * 2)[0]
    assert mean.isfinite().all()
