"""Nothing is ever lost, only late: deposited = applied × W + still in memory, over all ranks."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import sparsewire as sw
from sparsewire.memory import Memory
from sparsewire.selectors import Selector
from sparsewire.state import StepState

from .cases import (
    EPS,
    LAWFUL,
    SAMPLE,
    SCHEMES,
    WHOLE,
    WORLDS,
    Crew,
    dense,
    examples,
    is_cast,
    label,
    noise,
    within,
)

STEPS = 3
# a memory in bfloat16 loses what it rounds; tests/test_narrow_memory.py says how much
KEEPING = [m for m in examples("memory") if m.fields and m.dtype == "float32"]


class Balance:
    """The books of a crew, kept in double precision beside it."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.accumulated = torch.zeros(crew.size, dtype=torch.float64)
        self.applied = torch.zeros(crew.size, dtype=torch.float64)
        self.moved = torch.zeros(crew.size, dtype=torch.float64)  # magnitudes, for the tolerance
        self.most = torch.zeros(crew.size, dtype=torch.float64)  # that memory and mean ever held

    def step(self, gradients: list[Tensor], deposits: list[Tensor] | None = None) -> None:
        for accumulate in gradients if deposits is None else deposits:
            self.accumulated += accumulate.double()
            self.moved += accumulate.double().abs()
        mean = self.crew.exchange(gradients)[0].double()
        self.applied += self.crew.world_size * mean
        kept = [self.crew.remembered(rank).abs() for rank in range(self.crew.world_size)]
        held = self.crew.world_size * (mean.abs() + self.crew.owned().abs())
        held += torch.stack(kept).sum(dim=0)
        self.most = torch.maximum(self.most, held)

    def holds(self) -> bool:
        """Every operation of a step rounds once: a few per step and rank, each by eps / 2.

        Casts round in proportion to what was deposited. Quantized values may be far larger than
        those they stand for, and so is what they leave in the memory: that rounds as well.
        """
        scheme = self.crew.scheme.at(self.crew.step)
        scale = self.moved if is_cast(scheme.values) else self.moved + self.most
        rounding = 4 * EPS * (self.crew.step + self.crew.world_size) * scale
        return within(self.applied + self.crew.owed(), self.accumulated, rounding)


@pytest.mark.parametrize(("number", "scheme"), list(enumerate(SCHEMES)), ids=map(label, SCHEMES))
def test_nothing_is_lost(number: int, scheme: sw.Scheme) -> None:
    """A third of the schemes with every number of ranks, the others with one of them in turn."""
    for world_size in WORLDS if scheme in SAMPLE else [WORLDS[number % len(WORLDS)]]:
        balance = Balance(Crew(scheme, world_size))
        for step in range(STEPS):
            balance.step(noise(world_size, balance.crew.size, step))
            assert balance.holds(), f"world {world_size}, step {step}"


@pytest.mark.parametrize("scheme", SAMPLE, ids=label)
def test_something_is_held_back_unless_all_is_sent(scheme: sw.Scheme) -> None:
    crew = Crew(scheme)
    crew.exchange(noise(2, crew.size, 0))
    exact = scheme.values.exact(torch.float32) and not crew.segments.sparse
    assert bool(crew.owed().any()) is not exact


@pytest.mark.parametrize("selector", examples("selectors"), ids=label)
@pytest.mark.parametrize("memory", KEEPING, ids=label)
def test_nothing_that_a_memory_adds_is_lost(memory: Memory, selector: Selector) -> None:
    """What is deposited is what the memory says it adds: the gradient, or its momentum."""
    world_size = 3
    balance = Balance(Crew(sw.Scheme(selector, memory=memory, dense_below=WHOLE), world_size))
    crew = balance.crew
    for step in range(STEPS):
        gradients = noise(world_size, crew.size, step)
        deposits = []
        for rank, gradient in enumerate(gradients):
            before = {f.key: crew.remembered(rank, f.key).float() for f in memory.fields}
            state = StepState(before, {key: torch.zeros_like(kept) for key, kept in before.items()})
            deposits.append(memory.addend(gradient, state, crew.segments, world_size).clone())
        balance.step(gradients, deposits)
        assert balance.holds()


@pytest.mark.parametrize("selector", examples("selectors"), ids=label)
def test_without_memory_nothing_is_carried_over(selector: Selector) -> None:
    """The rule is one of `NoMemory`'s: a step does not depend on the steps before it."""
    scheme = sw.Scheme(selector, memory=sw.NoMemory(), dense_below=WHOLE)
    used, fresh = Crew(scheme), Crew(scheme)
    used.exchange(noise(2, used.size, 0))
    fresh.step = 1
    gradients = noise(2, used.size, 1)
    assert torch.equal(used.exchange(gradients)[0], fresh.exchange(gradients)[0])


@pytest.mark.parametrize("ease", [False, True])
def test_nothing_is_lost_when_a_warm_up_ends(ease: bool) -> None:
    scheme = sw.Warmup(sw.Scheme(sw.TopK(0.05), dense_below=WHOLE), steps=3, ease=ease)
    balance = Balance(Crew(scheme, 2))
    for step in range(6):
        balance.step(noise(2, balance.crew.size, step))
        assert balance.holds()


shapes = st.dictionaries(
    st.sampled_from("abcdef"),
    st.lists(st.integers(0, 6), max_size=3).map(tuple),
    min_size=1,
    max_size=4,
)
numbers = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


@given(
    data=st.data(),
    shapes=shapes,
    scheme=st.sampled_from(SCHEMES),
    limit=st.sampled_from([None, 0, 10]),
    world_size=st.integers(1, 4),
)
@LAWFUL
def test_nothing_is_lost_whatever_the_shapes_and_values(
    data: st.DataObject,
    shapes: dict[str, Any],
    scheme: sw.Scheme,
    limit: int | None,
    world_size: int,
) -> None:
    cut = sw.Scheme(
        scheme.selector,
        values=scheme.values,
        indices=scheme.indices,
        collective=scheme.collective,
        scope=scheme.scope,
        **dense(limit),
    )
    balance = Balance(Crew(cut, world_size, shapes))
    size = balance.crew.size
    for _ in range(2):
        rows = data.draw(
            st.lists(
                st.lists(numbers, min_size=size, max_size=size),
                min_size=world_size,
                max_size=world_size,
            )
        )
        balance.step([torch.tensor(row, dtype=torch.float32) for row in rows])
        assert balance.holds()


@pytest.mark.parametrize("collective", examples("collectives"), ids=label)
def test_float16_sends_what_is_too_large_in_instalments(collective: Any) -> None:
    """65504 is the most a float16 says; 200000 takes four steps and arrives whole."""
    scheme = sw.Scheme(sw.Dense(), values=sw.Float16(), collective=collective)
    crew = Crew(scheme, 2, {"x": (2,)})
    first = crew.exchange([torch.tensor([200_000.0, 1.0])] * 2)[0]
    assert first.tolist() == [65504.0, 1.0]
    arrived = [first] + [crew.exchange([torch.zeros(2)] * 2)[0] for _ in range(3)]
    assert torch.stack(arrived).sum(dim=0).tolist() == [200_000.0, 1.0]
    assert arrived[-1][0] < 65504
    assert not crew.owed().any()
