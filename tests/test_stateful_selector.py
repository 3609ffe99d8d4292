"""A selector with state of its own: saved, rescaled and rolled back with all else, also on owners.

`LowVariance` is no part of the library. It shows what a selector that keeps something needs: one
`StateField`, and a `select` that reads it and writes it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire import kernels
from sparsewire.adapters.simulation import Simulation
from sparsewire.kernels import Selection
from sparsewire.randomness import RandomKey
from sparsewire.segments import Segments
from sparsewire.selectors import Accumulation, Coordination, Sized
from sparsewire.state import OWNED, RESIDUAL, StateField, StepState
from sparsewire.workspace import Workspace

from .laws.cases import CPU, Crew, label, named_noise, noise, owned_places
from .laws.test_conservation import Balance
from .laws.test_contraction import LENGTHS, vectors

SQUARE = StateField("square", loss_scale_power=2, resize="mean")
OWNERS_SQUARE = SQUARE.for_owner.key


@dataclass(frozen=True, repr=False)
class LowVariance(Sized):
    """The largest magnitudes, where noisy coordinates count less.

    Keeps v ← β·v + (1 − β)·g², g being what the memory adds. A magnitude is divided by √(1 + v/v̄),
    with v̄ the mean over the segment and v/v̄ at most 3: it counts between a half and once.

    Reference: in the spirit of Tsuzuku et al. 2018; Wangni et al. 2018.
    """

    decay: float = 0.75
    coordination = Coordination.LOCAL
    fields = (SQUARE,)

    def capacity(self, length: int) -> int:
        return self.entries(length)

    def select(
        self,
        accumulation: Accumulation,
        segments: Segments,
        key: RandomKey,
        state: StepState,
        work: Workspace,
    ) -> Selection:
        before, addend, after = accumulation
        size = addend.numel()
        held, square = state.before[SQUARE.key][:size], state.after[SQUARE.key][:size]
        torch.lerp(held, addend.square(), 1 - self.decay, out=square)
        total = addend if before is None else before[:size] + addend
        chosen = [torch.empty(0, dtype=torch.int64, device=after.device)]
        for segment in segments.sparse:
            here = slice(segment.start, segment.stop)
            noise = (square[here] / square[here].mean()).nan_to_num(0).clamp(max=3)
            order = (total[here].abs() / (1 + noise).sqrt()).sort(descending=True, stable=True)
            chosen.append(segment.start + order.indices[: segment.count].sort().values)
        return kernels.on(after.device).chosen(*accumulation, segments, torch.cat(chosen), work)

    def contraction(self, length: int) -> float:
        return self.entries(length) / (4 * length)


def scheme(ratio: float = 0.1, **parts: Any) -> sw.Scheme:
    return sw.Scheme(LowVariance(ratio), **{"dense_below": 64, **parts})


SCHEMES = [
    scheme(),
    scheme(scope="global", values=sw.OneBit()),
    scheme(memory=sw.MomentumCorrection(0.5), scope=50),
    scheme(memory=sw.ErrorFeedback(dtype="bfloat16")),
    scheme(memory=sw.NoMemory()),
    scheme(collective=sw.Sharded()),
    scheme(collective=sw.Sharded(0.05), memory=sw.MomentumCorrection(0.5), values=sw.OneBit()),
    scheme(collective=sw.Sharded(), memory=sw.NoMemory(), scope="global"),
    scheme(collective=sw.Sharded(0.05), memory=sw.ErrorFeedback(dtype="bfloat16")),
    scheme(collective=sw.Sharded(1.0)),
]
EXACT = [one for one in SCHEMES if one.memory == sw.ErrorFeedback()]
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=label)

WORLD = 3


def run(crew: Crew, steps: int, factor: float = 1.0) -> list[Tensor]:
    """The means of the next steps."""
    means = []
    for _ in range(steps):
        gradients = [factor * each for each in noise(crew.world_size, crew.size, crew.step)]
        first, *others = crew.exchange(gradients)
        assert all(torch.equal(first, other) for other in others)
        means.append(first)
    return means


def states(crew: Crew) -> list[dict[str, Any]]:
    """What all ranks save, as it comes back from a file."""
    file = io.BytesIO()
    torch.save([session.state_dict() for session in crew.sessions], file)
    file.seek(0)
    loaded: list[dict[str, Any]] = torch.load(file, weights_only=True)
    return loaded


def load(crew: Crew, saved: Sequence[dict[str, Any]], strict: bool = True) -> None:
    for session, state in zip(crew.sessions, saved, strict=True):
        session.load_state_dict(state, strict)


def memories(crew: Crew) -> list[dict[str, dict[str, Tensor]]]:
    return [store.state_dict() for store in crew.stores]


def same(one: Any, other: Any) -> bool:
    """Whether two memories, or lists of them, hold the same bits under the same names."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)


# -- laws ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", EXACT, ids=label)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_nothing_is_lost(scheme: sw.Scheme, world_size: int) -> None:
    balance = Balance(Crew(scheme, world_size))
    for step in range(5):
        balance.step(noise(world_size, balance.crew.size, step))
        assert balance.holds(), step
    assert balance.crew.owed().any()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("ratio", [0.01, 0.3])
def test_contraction(ratio: float, length: int) -> None:
    """Whatever it has seen before, the worst for this very vector included."""
    selector = LowVariance(ratio)
    alone = scheme(ratio, memory=sw.NoMemory(), dense_below=0, dense_1d=False)
    generator = torch.Generator().manual_seed(length)
    for name, vector in vectors(length).items():
        seen = torch.randn(length, generator=generator) ** 4
        for square in (torch.zeros(length), 1e6 * seen, 1e6 * (vector == vector.max()), vector**4):
            crew = Crew(alone, 1, {"x": (length,)})
            crew.stores[0].load_state_dict({"x": {SQUARE.key: square.float()}})
            lost = (vector - crew.exchange([vector])[0]).double().square().sum()
            share = float(lost / vector.double().square().sum())
            assert share <= 1 - selector.contraction(length) + 1e-6, name


def test_the_noisy_ones_wait() -> None:
    crew = Crew(scheme(0.5, dense_below=0, dense_1d=False), 1, {"x": (2,)})
    crew.stores[0].load_state_dict(
        {"x": {RESIDUAL: torch.zeros(2), SQUARE.key: torch.tensor([100.0, 1.0])}}
    )
    assert crew.exchange([torch.tensor([3.0, 2.5])])[0].tolist() == [0, 2.5]
    assert crew.remembered(0).tolist() == [3, 0]


@each_scheme
def test_all_ranks_hold_the_same_and_keep_their_own(scheme: sw.Scheme) -> None:
    crew = Crew(scheme, WORLD)
    run(crew, 3)
    squares = [crew.remembered(rank, SQUARE.key) for rank in range(WORLD)]
    assert all((square > 0).all() for square in squares)
    assert not torch.equal(squares[0], squares[1])


def test_the_same_as_functions_and_as_simulation() -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (40, 50), "bias": (40,), "b": (64, 30)}
    warmed = sw.Warmup(scheme(), steps=2)
    for one in (*SCHEMES, warmed, replace(warmed, ease=True)):
        simulation = Simulation(one, shapes, WORLD, CPU)
        crew = Crew(one, WORLD, shapes)
        held = [sw.functional.init(one, named_noise(shapes, 0)) for _ in range(WORLD)]
        for step in range(5):
            given = [named_noise(shapes, 10 * step + rank) for rank in range(WORLD)]
            mean, held = sw.functional.simulate(given, held)
            for flat, gradient in zip(simulation.gradients, given, strict=True):
                for param, view in simulation.segments.views(flat):
                    view.copy_(gradient[param.name].flatten())
            simulation.exchange()
            order = [param.name for param in crew.segments.params]
            flats = [torch.cat([g[name].flatten() for name in order]) for g in given]
            expected = torch.cat([mean[name].flatten() for name in order])
            assert torch.equal(crew.exchange(flats)[0], expected), one
            for param, view in simulation.segments.views(simulation.gradients[0]):
                assert torch.equal(view, mean[param.name].flatten()), one
        assert same(memories(crew), [dict(state.memory) for state in held]), one


# -- checkpoints -----------------------------------------------------------------------------------


@each_scheme
def test_resumed_equals_never_stopped(scheme: sw.Scheme) -> None:
    crew = Crew(scheme, WORLD)
    run(crew, 3)
    saved = states(crew)
    expected = run(crew, 3)

    resumed = Crew(scheme, WORLD)
    load(resumed, saved)
    assert same(run(resumed, 3), expected)
    assert same(memories(resumed), memories(crew))

    forgetful = Crew(scheme, WORLD)
    for state in saved:
        for held in state["memory"].values():
            held[SQUARE.key].zero_()
    load(forgetful, saved)
    assert not same(run(forgetful, 3), expected)  # so it does matter


@pytest.mark.parametrize("strict", [True, False])
def test_state_without_the_field_is_refused(strict: bool) -> None:
    saved = states(Crew(scheme(), WORLD))
    del saved[1]["memory"]["matrix"][SQUARE.key]
    crew = Crew(scheme(), WORLD)
    run(crew, 1)
    before = memories(crew)
    reason = r"of matrix holds \['residual'\], .* keeps \['residual', 'square'\]"
    with pytest.raises(sw.errors.StateError, match=reason):
        crew.sessions[1].load_state_dict(saved[1], strict)
    assert same(memories(crew), before)


def test_state_of_another_selector_is_refused() -> None:
    plain = states(Crew(sw.Scheme(sw.TopK(0.1), dense_below=64), WORLD))
    with pytest.raises(sw.errors.StateError, match="attach with the saved scheme"):
        load(Crew(scheme(), WORLD), plain)
    with pytest.raises(sw.errors.StateError, match="attach with the selector and the memory="):
        load(Crew(scheme(), WORLD), plain, strict=False)


# -- scale of the loss -----------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [2.0**-4, 2.0**10])
@each_scheme
def test_another_loss_scale_changes_the_unit_only(scheme: sw.Scheme, factor: float) -> None:
    crew, scaled = Crew(scheme, WORLD), Crew(scheme, WORLD)
    run(crew, 3)
    run(scaled, 3)
    for store in scaled.stores:
        store.follow_loss_scale(factor)

    def assert_in_the_new_unit() -> None:
        powers = {field.key: field.loss_scale_power for field in scheme.fields}
        expected = [
            {
                name: {key: kept * factor ** powers[key] for key, kept in held.items()}
                for name, held in memory.items()
            }
            for memory in memories(crew)
        ]
        assert same(memories(scaled), expected)

    assert_in_the_new_unit()
    expected = [factor * mean for mean in run(crew, 3)]
    assert same(run(scaled, 3, factor), expected)
    assert_in_the_new_unit()


# -- steps that did not take place -----------------------------------------------------------------


@each_scheme
def test_a_step_that_fails_leaves_the_state_as_it_was(scheme: sw.Scheme) -> None:
    crew, undisturbed = Crew(scheme, WORLD), Crew(scheme, WORLD)
    assert same(run(crew, 2), run(undisturbed, 2))
    before = memories(crew)
    bad = noise(WORLD, crew.size, 99)
    bad[1][5] = math.nan
    _, status = crew.attempt(bad)
    assert status is not None
    assert same(memories(crew), before)
    assert same(run(crew, 3), run(undisturbed, 3))


@pytest.mark.parametrize("factor", [1.0, 0.25])
@each_scheme
def test_a_step_taken_back_leaves_the_state_as_it_was(scheme: sw.Scheme, factor: float) -> None:
    """Also if the scale of the loss has changed before it is taken back."""
    crew, undisturbed = Crew(scheme, WORLD), Crew(scheme, WORLD)
    run(crew, 3)
    run(undisturbed, 2)
    for session in crew.sessions:
        session.store.follow_loss_scale(factor)
        assert session.undo()
    for store in undisturbed.stores:
        store.follow_loss_scale(factor)
    assert same(memories(crew), memories(undisturbed))
    assert same(run(crew, 2), run(undisturbed, 2))


def test_a_deferred_step_keeps_its_gradient_and_nothing_else() -> None:
    crew = Crew(scheme(), 1)
    run(crew, 2)
    before = memories(crew)[0]
    transaction = crew.sessions[0].begin()
    unit = transaction.unit(0, crew.shapes, torch.float32, CPU)
    gradient = noise(1, crew.size, 2)[0]
    unit.flat.copy_(gradient)
    crew.group.drive([transaction.exchange(unit)], crew.all_counters)
    transaction.defer()
    for param, part in crew.segments.views(gradient):
        kept, was = crew.stores[0].get(param.name), before[param.name]
        assert torch.equal(kept[SQUARE.key], was[SQUARE.key])
        torch.testing.assert_close(kept[RESIDUAL], was[RESIDUAL] + part.view(param.shape))


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[5]], ids=label)
def test_the_state_of_unused_parameters_waits(scheme: sw.Scheme) -> None:
    crew = Crew(scheme, WORLD, skips_unused=True)
    run(crew, 2)
    before = memories(crew)
    gradients = noise(WORLD, crew.size, 2)
    unused = next(param for param in crew.segments.params if param.name == "matrix")
    for gradient in gradients:
        gradient[unused.start : unused.stop] = 0
    crew.exchange(gradients)
    after = memories(crew)
    for old, new in zip(before, after, strict=True):
        assert same(old["matrix"], new["matrix"])
        assert not torch.equal(old["conv"][SQUARE.key], new["conv"][SQUARE.key])


# -- shard owners ----------------------------------------------------------------------------------


def test_owners_keep_state_of_their_own() -> None:
    crew = Crew(scheme(collective=sw.Sharded()), WORLD)
    assert [f.key for f in crew.scheme.fields] == [RESIDUAL, "square", OWNED, "owned.square"]
    mean = run(crew, 1)[0]
    for rank, store in enumerate(crew.stores):
        for param, part in crew.segments.views(mean):
            kept = store.get(param.name)
            places = torch.tensor(owned_places(param, rank, WORLD), dtype=torch.int64)
            arrived = part[places] + kept[OWNED]  # what was sent, and what was not
            assert torch.equal(kept[OWNERS_SQUARE], 0.25 * arrived.square())


@pytest.mark.parametrize(
    "one",
    [
        scheme(collective=sw.Sharded(1.0)),  # send back all that arrived
        sw.Scheme(sw.RandomK(0.1), collective=sw.Sharded()),  # by magnitude
        scheme(),  # there are none
    ],
    ids=label,
)
def test_owners_that_select_by_something_else_keep_nothing_for_it(one: sw.Scheme) -> None:
    assert OWNERS_SQUARE not in {field.key for field in one.fields}


def test_owners_that_were_not_there_begin_with_nothing() -> None:
    direct = Crew(scheme(), WORLD)
    run(direct, 2)
    crew = Crew(scheme(collective=sw.Sharded()), WORLD)
    load(crew, states(direct), strict=False)
    expected = [direct.remembered(rank, SQUARE.key) for rank in range(WORLD)]
    assert same([crew.remembered(rank, SQUARE.key) for rank in range(WORLD)], expected)
    assert not any(held[OWNERS_SQUARE].any() for m in memories(crew) for held in m.values())
    run(crew, 1)


# -- warm-up ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [SCHEMES[0], SCHEMES[2], SCHEMES[5]], ids=label)
def test_while_everything_is_sent_the_state_waits(full: sw.Scheme) -> None:
    crew = Crew(full, WORLD)
    run(crew, 2)
    keys = {SQUARE.key, OWNERS_SQUARE}

    def squares(crew: Crew) -> list[dict[str, dict[str, Tensor]]]:
        return [
            {name: {k: t for k, t in held.items() if k in keys} for name, held in memory.items()}
            for memory in memories(crew)
        ]

    warm = Crew(sw.Warmup(full, steps=3), WORLD)
    load(warm, states(crew), strict=False)
    warm.step = 0
    for _ in range(3):
        run(warm, 1)
        assert same(squares(warm), squares(crew))
    run(warm, 1)
    assert not same(squares(warm), squares(crew))


def test_while_the_ratio_is_eased_in_the_state_is_kept() -> None:
    crew = Crew(sw.Warmup(scheme(), steps=3, ease=True), WORLD)
    gradients = noise(WORLD, crew.size, 0)
    run(crew, 1)
    for rank, gradient in enumerate(gradients):
        assert torch.equal(crew.remembered(rank, SQUARE.key), (0.25 * gradient.square()).double())
