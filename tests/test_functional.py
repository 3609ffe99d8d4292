"""Exchange as a function: pure, repeatable, and the same alone, simulated or resumed."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

import sparsewire as sw

from .laws.cases import SAMPLE, SHAPES, Crew, examples, flatten, label, named_noise

LAYERED = [s for s in SAMPLE if s.scope == "layer"]
SCHEME = sw.Scheme(sw.BlockRandomK(0.1), memory=sw.MomentumCorrection(0.5), dense_below=64)


def equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Same names in the same order, same bits."""
    return list(first) == list(second) and all(torch.equal(first[n], second[n]) for n in first)


def same(first: sw.functional.State, second: sw.functional.State) -> bool:
    """Same scheme, step and memory."""
    return (first.scheme, first.step) == (second.scheme, second.step) and all(
        equal(first.memory[name], second.memory[name]) for name in first.memory
    )


def run(
    states: list[sw.functional.State], begin: int, end: int
) -> tuple[list[dict[str, Tensor]], list[sw.functional.State]]:
    """Steps `begin` to `end` of all workers; the means and the states after."""
    means = []
    for step in range(begin, end):
        gradients = [named_noise(SHAPES, 100 * step + rank) for rank in range(len(states))]
        mean, states = sw.functional.simulate(gradients, states)
        means.append(mean)
    return means, states


def fresh(scheme: sw.Scheme | str = SCHEME, workers: int = 2) -> list[sw.functional.State]:
    return [sw.functional.init(scheme, named_noise(SHAPES, 0)) for _ in range(workers)]


def test_no_module_hides_a_public_name() -> None:
    """As the module `exchange` might, once something imports it."""
    assert "sparsewire.exchange" in sys.modules
    assert not any(isinstance(getattr(sw, name), ModuleType) for name in sw.__all__)


def test_init() -> None:
    parameters = {
        "a": torch.ones(2, 3, dtype=torch.bfloat16),
        "b": torch.ones(4, dtype=torch.float64),
    }
    state = sw.functional.init("Scheme(TopK(0.1), memory=MomentumCorrection())", parameters)
    assert state.step == 0
    assert repr(state.scheme) == "Scheme(TopK(0.1), memory=MomentumCorrection())"
    assert {n: set(kept) for n, kept in state.memory.items()} == {
        "a": {"residual", "velocity"},
        "b": {"residual", "velocity"},
    }
    assert state.memory["a"]["residual"].dtype == torch.float32
    assert state.memory["b"]["velocity"].dtype == torch.float64
    assert state.memory["a"]["residual"].shape == (2, 3)
    assert not state.memory["a"]["residual"].any()


@pytest.mark.parametrize("scheme", LAYERED, ids=label)
def test_arguments_are_left_alone(scheme: sw.Scheme) -> None:
    _, states = run(fresh(scheme), 0, 1)
    gradients = [named_noise(SHAPES, rank) for rank in range(2)]
    kept = copy.deepcopy((gradients, states))
    sw.functional.simulate(gradients, states)
    assert all(equal(now, was) for now, was in zip(gradients, kept[0], strict=True))
    assert all(same(now, was) for now, was in zip(states, kept[1], strict=True))


def test_results_share_no_memory_with_arguments() -> None:
    gradients, states = [named_noise(SHAPES, 0)], fresh(workers=1)
    mean, after = sw.functional.simulate(gradients, states)
    for name in SHAPES:
        mean[name].fill_(7)
        after[0].memory[name]["residual"].fill_(7)
    assert equal(gradients[0], named_noise(SHAPES, 0))
    assert not any(kept["residual"].any() for kept in states[0].memory.values())


@pytest.mark.parametrize("scheme", LAYERED, ids=label)
def test_alone_is_a_simulation_of_one(scheme: sw.Scheme) -> None:
    (alone,), simulated = fresh(scheme, 1), fresh(scheme, 1)
    for step in range(3):
        gradients = named_noise(SHAPES, step)
        mean, alone = sw.functional.exchange(gradients, alone, sw.groups.Alone())
        expected, simulated = sw.functional.simulate([gradients], simulated)
        assert equal(mean, expected)
        assert same(alone, simulated[0])


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_functions_and_sessions_give_the_same_bits(scope: str) -> None:
    scheme = sw.Scheme(sw.TopK(0.1), scope=scope, dense_below=64)  # type: ignore[arg-type]
    crew, states = Crew(scheme, 3), fresh(scheme, 3)
    for step in range(3):
        gradients = [named_noise(SHAPES, 10 * step + rank) for rank in range(3)]
        segments = crew.segments
        means = crew.exchange([flatten(g, segments) for g in gradients])
        mean, states = sw.functional.simulate(gradients, states)
        assert torch.equal(flatten(mean, segments), means[0])


@pytest.mark.parametrize("selector", examples("selectors"), ids=label)
def test_simulation_can_be_repeated(selector: sw.TopK) -> None:
    scheme = sw.Scheme(selector, dense_below=64)
    first, second = (run(fresh(scheme, 3), 0, 4) for _ in range(2))
    assert all(equal(one, other) for one, other in zip(first[0], second[0], strict=True))
    assert all(same(one, other) for one, other in zip(first[1], second[1], strict=True))


@pytest.mark.parametrize("memory", examples("memory"), ids=label)
@pytest.mark.parametrize("selector", examples("selectors"), ids=label)
def test_resumed_is_as_never_stopped(selector: sw.TopK, memory: sw.ErrorFeedback) -> None:
    scheme = sw.Scheme(selector, memory=memory, dense_below=64)
    _, states = run(fresh(scheme), 0, 3)
    file = io.BytesIO()
    torch.save([(repr(s.scheme), s.step, s.memory) for s in states], file)
    file.seek(0)
    loaded = [
        sw.functional.State(sw.parse(text), step, kept)
        for text, step, kept in torch.load(file, weights_only=True)
    ]
    straight, resumed = run(states, 3, 6), run(loaded, 3, 6)
    assert all(equal(one, other) for one, other in zip(straight[0], resumed[0], strict=True))
    assert all(same(one, other) for one, other in zip(straight[1], resumed[1], strict=True))


def test_step_number_matters_to_what_is_drawn() -> None:
    """A resumed run that forgot its step would draw the first coordinates again."""
    _, states = run(fresh(), 0, 3)
    forgetful = [replace(state, step=0) for state in states]
    assert not equal(run(states, 3, 4)[0][0], run(forgetful, 3, 4)[0][0])


def test_bad_numbers_leave_the_state_as_it_was() -> None:
    _, states = run(fresh(), 0, 2)
    kept = copy.deepcopy(states)
    gradients = [named_noise(SHAPES, rank) for rank in range(2)]
    gradients[1]["matrix"][3, 3] = torch.nan
    with pytest.raises(
        sw.errors.NonFiniteError, match="at step 2: rank 1 in matrix; the state is as it"
    ):
        sw.functional.simulate(gradients, states)
    assert all(same(now, was) for now, was in zip(states, kept, strict=True))
    gradient = named_noise(SHAPES, 0)
    gradient["bias"][0] = torch.inf
    with pytest.raises(sw.errors.NonFiniteError, match="rank 0 in bias"):
        sw.functional.exchange(gradient, states[0], sw.groups.Alone())


def test_order_of_names_is_kept() -> None:
    gradients = {"b": torch.ones(3), "w": torch.ones(40, 40), "a": torch.ones(2)}
    mean, _ = sw.functional.simulate(
        [gradients], [sw.functional.init("Scheme(TopK(0.1), scope='global')", gradients)]
    )
    assert list(mean) == ["b", "w", "a"]


def test_gradients_of_any_layout() -> None:
    gradients = {"w": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)}
    mean, _ = sw.functional.simulate([gradients], [sw.functional.init("Dense()", gradients)])
    assert torch.equal(mean["w"], gradients["w"])


def test_warm_up_ends_after_its_steps() -> None:
    scheme = sw.Warmup(sw.Scheme(sw.TopK(0.1), dense_below=64), steps=2)
    means, _ = run([sw.functional.init(scheme, named_noise(SHAPES, 0))], 0, 4)
    sent = [int(mean["matrix"].count_nonzero()) for mean in means]
    assert sent == [312, 312, 32, 32]


def test_meter_counts_steps_values_and_bytes() -> None:
    _, states = run(fresh("Scheme(TopK(0.1), dense_below=64)"), 0, 3)
    explained = sw.explain("Scheme(TopK(0.1), dense_below=64)", SHAPES, 2)
    for state in states:
        assert state.counters.steps == 3
        assert state.counters.values == 3 * explained.parameters
        assert state.counters.bytes_sent == 3 * explained.sent_bytes


@pytest.mark.parametrize(("gradients", "states"), [(0, 0), (1, 2), (2, 1)])
def test_workers_are_counted(gradients: int, states: int) -> None:
    with pytest.raises(sw.errors.StateError, match=f"not {gradients} and {states}"):
        sw.functional.simulate([named_noise(SHAPES, 0)] * gradients, fresh(workers=2)[:states])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"matrix": torch.zeros(13, 24)}, "residual of matrix has shape"),
        ({"more": torch.zeros(2)}, "lacks more"),
    ],
)
def test_gradients_must_fit_the_state(change: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(sw.errors.StateError, match=reason):
        sw.functional.simulate([{**named_noise(SHAPES, 0), **change}], fresh("TopK(0.1)", 1))


def test_workers_with_different_schemes_are_refused() -> None:
    states = [fresh("TopK(0.1)", 1)[0], fresh("TopK(0.2)", 1)[0]]
    with pytest.raises(sw.errors.DisagreementError, match="the scheme"):
        sw.functional.simulate([named_noise(SHAPES, 0)] * 2, states)


def test_no_parameters_at_all() -> None:
    assert sw.functional.simulate([{}], [sw.functional.init("TopK(0.1)", {})])[0] == {}


def test_memory_that_was_replaced_is_used_and_checked() -> None:
    """Also where only an entry of the dictionary is another tensor."""
    gradients = {"w": torch.randn(20, 20, generator=torch.Generator().manual_seed(0))}
    _, state = sw.functional.exchange(
        gradients, sw.functional.init("TopK(0.1)", gradients), sw.groups.Alone()
    )
    expected, _ = sw.functional.exchange(
        gradients, replace(state, memory={"w": {"residual": torch.ones(20, 20)}}), sw.groups.Alone()
    )
    state.memory["w"]["residual"] = torch.ones(20, 20)
    found, _ = sw.functional.exchange(gradients, state, sw.groups.Alone())
    assert torch.equal(found["w"], expected["w"])
    state.memory["w"]["residual"] = torch.full((20, 20), float("nan"))
    with pytest.raises(sw.errors.StateError, match="NaN"):
        sw.functional.exchange(gradients, state, sw.groups.Alone())


@pytest.mark.parametrize("scheme", ["TopK(0.01)", "Threshold(0.01)", "RandomK(0.01)"])
def test_descendants_of_one_state_may_run_in_several_threads(scheme: str) -> None:
    start = sw.functional.init(scheme, {"w": torch.zeros(300, 300)})
    _, start = sw.functional.exchange({"w": torch.ones(300, 300)}, start, sw.groups.Alone())

    def walk(seed: int) -> torch.Tensor:
        state, generator = start, torch.Generator().manual_seed(seed)
        for _ in range(15):
            gradients = {"w": torch.randn(300, 300, generator=generator)}
            mean, state = sw.functional.exchange(gradients, state, sw.groups.Alone())
        return mean["w"]

    alone = [walk(seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(walk, range(3)))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_states_can_be_copied_and_pickled() -> None:
    gradients = {"w": torch.randn(20, 20, generator=torch.Generator().manual_seed(0))}
    _, state = sw.functional.exchange(
        gradients, sw.functional.init("TopK(0.1)", gradients), sw.groups.Alone()
    )
    expected, _ = sw.functional.exchange(gradients, state, sw.groups.Alone())
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        found, _ = sw.functional.exchange(gradients, copied, sw.groups.Alone())
        assert torch.equal(found["w"], expected["w"])
