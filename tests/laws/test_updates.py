"""Exchange of updates: nothing is lost, ranks stay together, and the papers' algorithms follow."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparsewire as sw
from sparsewire.adapters.updates import PERIOD
from sparsewire.exchange import NonFinite
from sparsewire.scheme import AnyScheme

from . import problem, twins
from .cases import EPS, SAMPLE, SHAPES, WHOLE, WORLDS, Crew, label, noise, within
from .meeting import Make, Rank, Team, adamw, pull, sgd, start

DECAY = 0.75
TOP_K = sw.Scheme(sw.TopK(0.1), dense_below=WHOLE)
DENSE = sw.Scheme(sw.Dense())
NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def outer_sgd(parameters: Any) -> torch.optim.Optimizer:
    """DiLoCo's outer optimizer."""
    return torch.optim.SGD(parameters, **NESTEROV)  # type: ignore[arg-type]


def decaying(scheme: sw.Scheme, decay: float = DECAY) -> sw.Scheme:
    return replace(scheme, memory=sw.ErrorFeedback(decay=decay))


# the schemes that other laws run with every number of ranks, some of them with a decay
MIXED = [decaying(s) if number % 5 < 2 else s for number, s in enumerate(SAMPLE)]
FEW = MIXED[::7]


class Balance:
    """The books of a team, kept in double precision beside it."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.start = team.first.shared.double()
        self.computed = torch.zeros_like(self.start)
        self.lost = torch.zeros_like(self.start)  # by decay
        self.moved = torch.zeros_like(self.start)  # magnitudes, for the tolerance
        self.most = team.world_size * self.start.abs()  # that weights, memory and mean ever held
        self.rounds = 0

    def round(self) -> None:
        """A round that goes well."""
        assert self.team.round() is None
        self.note()

    def note(self) -> None:
        """Count what a round computed, and what of it its decay will have lost."""
        self.rounds += 1
        self.add([rank.update.double() for rank in self.team.ranks])
        self.decay()

    def add(self, updates: list[Tensor]) -> None:
        for update in updates:
            self.computed += update
            self.moved += update.abs()

    def decay(self) -> None:
        team, beta = self.team, self.team.scheme.memory.decay
        kept = torch.stack([rank.residual.double() for rank in team.ranks])
        self.lost += kept.sum(dim=0) * (1 - beta) / beta
        held = kept.abs().sum(dim=0) / beta + team.owed().abs() + self.lost.abs()
        held += team.world_size * team.first.shared.double().abs()
        self.most = torch.maximum(self.most, held)

    def holds(self) -> bool:
        """Every operation rounds once, and weights round at their own size."""
        team = self.team
        applied = team.world_size * (self.start - team.first.shared.double())
        rounding = 4 * EPS * (self.rounds + team.world_size) * (self.moved + self.most)
        return within(applied + team.owed() + self.lost, self.computed, rounding)


# -- nothing is lost -----------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "scheme"), list(enumerate(MIXED)), ids=map(label, MIXED))
def test_what_was_computed_is_applied_or_still_to_come(number: int, scheme: sw.Scheme) -> None:
    """W·(x₀ − x_T) + what is owed + what decayed = all updates that any rank computed."""
    world_size = WORLDS[number % len(WORLDS)]
    every, ahead = (1, 3)[number % 7 % 2], (0.0, 0.5, "auto")[number % 3]
    balance = Balance(Team(scheme, world_size, every=every, step_ahead=ahead))  # type: ignore[arg-type]
    for _ in range(3):
        balance.round()
        assert balance.holds()


WARM = sw.parse(f"Warmup(Scheme(TopK(0.1), dense_below={WHOLE}), steps=2)")


@pytest.mark.parametrize("scheme", [*MIXED[::4], WARM], ids=label)
def test_nothing_is_lost_with_a_delay(scheme: AnyScheme) -> None:
    """Beside it, one update of every rank is under way."""
    team = Team(scheme, 3, adamw(), every=2, step_ahead=0.5, is_delayed=True)
    balance = Balance(team)
    waiting: list[Tensor] = []
    for _ in range(4):
        assert team.round() is None
        balance.add(waiting)
        if waiting:
            balance.rounds += 1
            balance.decay()
        assert balance.holds()
        waiting = [rank.update.double() for rank in team.ranks]
    assert balance.rounds == 3


@pytest.mark.parametrize("scheme", MIXED[::3], ids=label)
def test_what_a_rank_sends_is_what_its_residual_lacks(scheme: sw.Scheme) -> None:
    """By rank: e + update = sent + e_after / decay, with what its own message said."""
    team = Team(scheme, 3, every=2)
    beta = scheme.memory.decay
    for _ in range(2):
        before = [rank.residual for rank in team.ranks]
        assert team.round() is None
        for rank, residual in zip(team.ranks, before, strict=True):
            entered = (residual + rank.update).double()
            sent = _sent(rank)
            scale = entered.abs() + sent.abs() + residual.abs()
            assert within(sent + rank.residual.double() / beta, entered, 4 * EPS * scale)


def _sent(rank: Rank) -> Tensor:
    """What a rank's message said, in the model's order."""
    transaction = rank.updates._transaction
    assert transaction is not None
    finding, _ = transaction._findings[0]
    selection, segments = finding.selection, finding.segments
    values = selection.values - (0 if finding.returned is None else finding.returned)
    flat = torch.zeros(segments.size + 1, dtype=torch.float64)
    count = selection.indices.numel()
    flat[selection.indices] = values[:count].double()
    at = count
    for begin, end in segments.dense_runs:
        flat[begin:end] = values[at : at + end - begin].double()
        at += end - begin
    return rank.flat(rank.updates.weights.values(flat[:-1])).double()


def test_a_dense_exchange_keeps_nothing() -> None:
    team = Team(DENSE, 3, adamw(), every=3)
    for _ in range(3):
        before = team.first.shared
        assert team.round() is None
        mean = torch.stack([rank.update for rank in team.ranks]).mean(dim=0)
        torch.testing.assert_close(team.first.shared, before - mean)
        assert not team.owed().any()
        assert torch.equal(team.first.live, team.first.shared)


@pytest.mark.parametrize("selector", ["TopK(0.1)", "UnionTopK(0.1)", "BlockRandomK(0.3)"])
def test_nothing_is_lost_when_a_warm_up_ends(selector: str) -> None:
    inside = f"Scheme({selector}, dense_below={WHOLE})"
    balance = Balance(Team(f"Warmup({inside}, steps=3, ease=True)", 2, step_ahead=0.5))
    for _ in range(6):
        balance.round()
        assert balance.holds()
        _assert_in_step(balance.team)


@pytest.mark.parametrize("is_delayed", [False, True])
def test_weights_follow_the_layout_of_the_scheme(is_delayed: bool) -> None:
    """A scheme over all tensors together, in which parameters lie in another order, changes none
    of the numbers if all is sent."""
    ends = []
    for last in DENSE, replace(DENSE, scope="global", dense_below=WHOLE):
        team = Team(DENSE, 2, every=2, is_delayed=is_delayed)
        for number in range(4):
            assert team.round() is None
            for rank in team.ranks:
                rank.updates.session.scheme = last if number else DENSE
        ends.append(team.first.shared)
    assert torch.equal(*ends)
    assert list(team.first.updates.weights.values(ends[0])) != team.first.names


# -- ranks stay together -------------------------------------------------------------------------


def _assert_in_step(team: Team) -> None:
    """All ranks share the same bits, and live weights are x − λ·e to the bit."""
    for rank in team.ranks:
        assert torch.equal(rank.shared, team.first.shared)
        assert rank.updates.ahead == team.first.updates.ahead
        assert torch.equal(rank.live, _ahead_of(rank, rank.residual))


def _ahead_of(rank: Rank, late: Tensor) -> Tensor:
    """x − λ·late, as the parameters can hold it."""
    flat = torch.sub(rank.shared, late, alpha=rank.updates.ahead)
    parts = flat.split([p.numel() for p in rank.updates.weights.parameters.values()])
    held = zip(rank.updates.weights.parameters.items(), parts, strict=True)
    return rank.flat({name: part.to(p.dtype) for (name, p), part in held})


BF16 = {"conv": torch.bfloat16, "matrix": torch.bfloat16}


@pytest.mark.parametrize("dtypes", [None, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("ahead", [0.0, 0.3, 1.0, "auto"])
@pytest.mark.parametrize("scheme", FEW[::3], ids=label)
def test_shared_weights_are_equal_to_the_last_bit(
    scheme: sw.Scheme, ahead: Any, dtypes: Mapping[str, torch.dtype] | None
) -> None:
    team = Team(scheme, 3, adamw(), every=2, dtypes=dtypes, step_ahead=ahead)
    for _ in range(4):
        before = team.first.shared
        assert team.round() is None
        _assert_in_step(team)
        assert not torch.equal(team.first.shared, before)


@pytest.mark.parametrize("scheme", FEW, ids=label)
def test_shared_weights_are_equal_with_an_outer_optimizer(scheme: sw.Scheme) -> None:
    team = Team(scheme, 2, adamw(), every=2, outer=outer_sgd, step_ahead=0.5)
    for _ in range(3):
        team.train()
        gradients = [parameter.grad for parameter in team.first.model.parameters()]
        assert team.exchange() is None
        _assert_in_step(team)
        now = [parameter.grad for parameter in team.first.model.parameters()]
        assert all(one is other for one, other in zip(now, gradients, strict=True))


@pytest.mark.parametrize("outer", [None, outer_sgd])
@pytest.mark.parametrize("scheme", FEW[::2], ids=label)
def test_shared_weights_are_equal_with_a_delay(scheme: sw.Scheme, outer: Make | None) -> None:
    """A round begins as if nothing of the update under way were sent: at x − λ·(e + update)."""
    team = Team(scheme, 3, every=2, outer=outer, step_ahead=0.5, is_delayed=True)
    for _ in range(4):
        assert team.round() is None
        for rank in team.ranks:
            assert torch.equal(rank.shared, team.first.shared)
            late = (rank.residual + rank.update).double()
            expected = rank.shared.double() - 0.5 * late
            scale = rank.shared.abs() + late.abs() + rank.residual.abs()
            assert within(rank.live, expected, 2 * EPS * scale)


def test_wide_weights_are_shared_in_full() -> None:
    """A bfloat16 parameter cannot hold small updates; the shared weights add them up."""
    values = {"x": torch.ones(64)}
    step = 2.0**-8  # between the numbers below 1 that bfloat16 has
    team = Team(
        DENSE,
        2,
        sgd(1.0),
        shapes={"x": (64,)},
        values=values,
        dtypes={"x": torch.bfloat16},
        pull=lambda x, rank, number: torch.full_like(x, 3 * step if rank else -2 * step),
    )
    assert team.round() is None
    assert torch.equal(1 - team.first.shared, torch.full((64,), step / 2))
    assert torch.equal(team.first.live, values["x"])
    assert team.round() is None
    assert torch.equal(1 - team.first.live, torch.full((64,), step))


def test_float64_parameters_are_shared_in_float64() -> None:
    team = Team(
        TOP_K,
        2,
        dtypes=dict.fromkeys(start({"x": (300,)}), torch.float64),
        shapes={"x": (300,)},
        step_ahead=0.5,
    )
    assert team.round() is None
    assert team.first.updates.weights.shared.dtype == torch.float64
    _assert_in_step(team)


def test_machines_share_what_their_leaders_exchange() -> None:
    team = Team(TOP_K, 4, adamw(), every=2, machines=2, outer=outer_sgd)
    for number in range(3):
        team.network.corrupt = 0 if number == 1 else None
        is_corrupt = isinstance(team.round(), sw.errors.CorruptMessageError)
        assert is_corrupt is (number == 1)
        for rank in team.ranks:
            assert torch.equal(rank.shared, team.first.shared)
            assert torch.equal(rank.live, rank.shared)


# -- twins in NumPy ------------------------------------------------------------------------------

ROUNDS = 15
CHUNK = 16
CHUNKS = [
    slice(at, min(at + CHUNK, layer.stop))
    for layer in problem.LAYERS
    for at in range(layer.start, layer.stop, CHUNK)
]


def assert_same_path(
    scheme: sw.Scheme,
    make: Make,
    local: Any,
    choose: twins.Choose,
    *,
    workers: int = 3,
    every: int = 1,
    outer: tuple[Make | None, twins.Local],
    decay: float = 1.0,
    ahead: float = 0.0,
) -> None:
    paths = problem.walk_updates(
        scheme, workers, [0.05] * ROUNDS, make, every=every, outer=outer[0], step_ahead=ahead
    )
    locals_ = [local() for _ in range(workers)]
    expected = twins.local_updates(
        problem.START, problem.gradient, choose, locals_, outer[1], ROUNDS, every, decay, ahead
    )
    for path in paths:
        np.testing.assert_allclose(path, expected, rtol=1e-4, atol=1e-5)


def everything(vector: twins.Array, worker: int, step: int) -> Any:
    return np.arange(len(vector))


def plain(rate: float) -> tuple[Make | None, twins.Local]:
    """The mean update times α: by SGD, or subtracted as it is."""
    return None if rate == 1 else sgd(rate), twins.sgd(rate)


LOCALS: dict[str, tuple[Make, Any]] = {
    "adamw": (adamw(0.05), lambda: twins.adamw(0.05)),
    "sgd": (sgd(0.05), lambda: twins.sgd(0.05)),
    "momentum": (sgd(0.05, momentum=0.9), lambda: twins.sgd(0.05, 0.9)),
}


@pytest.mark.parametrize("alpha", [1.0, 0.8])
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("local", LOCALS)
def test_sparse_loco(local: str, every: int, alpha: float) -> None:
    """Local steps, top-k by chunk of a decaying residual, and α times the mean."""
    scheme = sw.Scheme(
        sw.TopK(0.2),
        scope=CHUNK,
        memory=sw.ErrorFeedback(decay=0.95),
        dense_below=0,
        dense_1d=False,
    )
    choose = twins.largest(CHUNKS, 0.2)
    make, twin = LOCALS[local]
    assert_same_path(scheme, make, twin, choose, every=every, outer=plain(alpha), decay=0.95)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("local", LOCALS)
def test_diloco(local: str, every: int, workers: int) -> None:
    """Everything is sent, and Nesterov's momentum takes the mean update as gradient."""
    outer = (outer_sgd, twins.sgd(0.7, 0.9, nesterov=True))
    make, twin = LOCALS[local]
    assert_same_path(DENSE, make, twin, everything, workers=workers, every=every, outer=outer)


@pytest.mark.parametrize("ahead", [0.3, 1.0])
@pytest.mark.parametrize("every", [1, 4])
def test_step_ahead(every: int, ahead: float) -> None:
    scheme = sw.Scheme(sw.TopK(0.12), dense_below=0, dense_1d=False)
    choose = twins.largest(problem.LAYERS, 0.12)
    make, twin = LOCALS["sgd"]
    assert_same_path(scheme, make, twin, choose, every=every, outer=plain(1), ahead=ahead)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_momentum_in_the_update_is_momentum_correction(workers: int, nesterov: bool) -> None:
    """The same path as gradients exchanged with `MomentumCorrection(masking=False)`."""
    memory = sw.MomentumCorrection(0.7, nesterov=nesterov, masking=False)
    rates = [0.05] * 30
    corrected = sw.Scheme(sw.TopK(0.12), memory=memory, dense_below=0, dense_1d=False)
    expected = problem.walk_simulated(corrected, workers, rates)
    scheme = replace(corrected, memory=sw.ErrorFeedback())
    make = sgd(0.05, momentum=0.7, nesterov=nesterov)
    for path in problem.walk_updates(scheme, workers, rates, make):
        np.testing.assert_allclose(path, expected, rtol=1e-4, atol=1e-5)


def test_twins_tell_variants_apart() -> None:
    """The options that the tests above try lead elsewhere, so that they test something."""

    def end(local: twins.Local, every: int = 4, decay: float = 1.0, ahead: float = 0.0) -> Any:
        choose, outer = twins.largest(CHUNKS, 0.2), twins.sgd(1.0)
        return twins.local_updates(
            problem.START, problem.gradient, choose, [local], outer, ROUNDS, every, decay, ahead
        )[-1]

    ends = [
        end(twins.adamw(0.05)),
        end(twins.sgd(0.05)),
        end(twins.sgd(0.05, 0.9)),
        end(twins.sgd(0.05), every=1),
        end(twins.sgd(0.05), decay=0.5),
        end(twins.sgd(0.05), ahead=1.0),
    ]
    for one, other in itertools.combinations(ends, 2):
        assert np.abs(one - other).max() > 1e-3


# -- how far ahead -------------------------------------------------------------------------------

LONG = {"x": (60, 50)}


def _measure(kind: str, world_size: int, rounds: int = 6) -> tuple[list[float], Team]:
    """λ after every round; ranks that see the same, different things, or partly the same."""

    def noise(x: Tensor, rank: int, step: int) -> Tensor:
        return pull(torch.zeros_like(x), rank, step)

    kinds = {
        "same": lambda x, rank, step: noise(x, 0, step),
        "different": noise,
        "mixed": lambda x, rank, step: noise(x, rank, step) + noise(x, 99, step),
    }
    values = {"x": torch.zeros(LONG["x"])}
    scheme = sw.Scheme(sw.TopK(0.1), dense_below=0)
    team = Team(scheme, world_size, shapes=LONG, values=values, pull=kinds[kind], step_ahead="auto")
    found = []
    for _ in range(rounds):
        assert team.round() is None
        _assert_in_step(team)
        found.append(team.first.updates.ahead)
    return found, team


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(("kind", "low", "high"), [("same", 1, 1), ("different", 0, 0)])
def test_the_common_share_is_measured(kind: str, low: int, high: int, world_size: int) -> None:
    """1 where residuals are equal, 1/W where they are independent, and nothing to begin with."""
    shares, _ = _measure(kind, world_size)
    assert shares[0] == 0  # there is no residual yet
    for share in shares[1:]:
        assert 0 <= share <= 1
        assert abs(share - (low or 1 / world_size)) < (1e-9 if high else 0.08)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_sample_tells_about_all_of_the_residual(world_size: int) -> None:
    _, team = _measure("mixed", world_size, rounds=4)
    rows = torch.stack([rank.residual for rank in team.ranks]).double()
    expected = rows.mean(dim=0).square().sum() / rows.square().sum(dim=1).mean()
    assert team.round() is None  # the fifth compares what the fourth left: rounds 1, 2, 4, 8
    assert 1 / world_size + 0.1 < expected < 0.9
    assert abs(team.first.updates.ahead - float(expected)) < 0.05


def test_when_it_is_measured() -> None:
    """In rounds 1, 2, 4, 8 and from then on every sixteenth."""
    shares, _ = _measure("mixed", 2, rounds=2 * PERIOD + 2)
    changed = [n for n in range(1, len(shares)) if shares[n] != shares[n - 1]]
    assert changed == [1, 2, 4, 8, 16, 32, PERIOD, 2 * PERIOD]


def test_without_a_residual_nobody_is_ahead() -> None:
    team = Team(sw.Scheme(sw.TopK(0.1), memory=sw.NoMemory()), 2, step_ahead="auto")
    for _ in range(3):
        assert team.round() is None
        assert team.first.updates.ahead == 0


# -- one round late ------------------------------------------------------------------------------


def _exact(x: Tensor, rank: int, step: int) -> Tensor:
    """Gradients with which nothing rounds, if rates are powers of two and two ranks exchange."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(-8, 9, x.shape, generator=generator).float()


@pytest.mark.parametrize("ahead", [0.0, 0.5])
@pytest.mark.parametrize("selector", [sw.TopK(0.2), sw.Dense(), sw.RandomK(0.3)], ids=label)
def test_a_round_applies_what_the_last_one_sent(selector: Any, ahead: float) -> None:
    """With numbers that never round, the path is that without a delay, one round later."""

    def make(is_delayed: bool) -> Team:
        return Team(
            sw.Scheme(selector, dense_below=0, dense_1d=False),
            2,
            sgd(0.25),
            every=2,
            shapes={"x": (40,)},
            values={"x": torch.zeros(40)},
            pull=_exact,
            step_ahead=ahead,
            is_delayed=is_delayed,
        )

    now, late = make(False), make(True)
    path = [now.first.shared]
    for _ in range(6):
        assert now.round() is None
        assert late.round() is None
        assert torch.equal(late.first.shared, path[-1])
        path.append(now.first.shared)
    assert late.finish() is None
    assert torch.equal(late.first.shared, path[-1])
    assert torch.equal(late.owed(), now.owed())
    assert path[-1].any()


def test_the_update_under_way_may_be_deferred() -> None:
    team = Team(decaying(TOP_K), 3, every=2, step_ahead=0.5, is_delayed=True)
    for _ in range(2):
        assert team.round() is None
    entered = [rank.residual + rank.update for rank in team.ranks]
    before = team.first.shared
    team.train()
    team.network.corrupt = 0
    team.take_down()
    for rank, total in zip(team.ranks, entered, strict=True):
        torch.testing.assert_close(rank.residual, DECAY * total)
        assert torch.equal(rank.shared, before)
    _assert_in_step(team)
    team.network.corrupt = None
    assert team.round() is None
    assert team.finish() is None
    assert not torch.equal(team.first.shared, before)


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", MIXED[1::6], ids=label)
def test_a_corrupt_message_defers_the_update(scheme: sw.Scheme) -> None:
    """Whichever message it is, except a status: nothing counts as sent, and the next round sends
    it."""
    team = Team(scheme, 3, every=2, step_ahead=0.5)
    balance = Balance(team)
    balance.round()
    beta = scheme.memory.decay
    messages = team.network.count - 1  # the last one is the status
    assert messages
    for team.network.corrupt in range(messages):
        shared, owned = team.first.shared, _owned(team)
        before = [rank.residual for rank in team.ranks]
        steps = [rank.updates.session.steps for rank in team.ranks]
        found = team.round()
        assert isinstance(found, sw.errors.CorruptMessageError), team.network.corrupt
        for rank, residual in zip(team.ranks, before, strict=True):
            scale = residual.abs() + rank.update.abs() + _sent(rank).abs()
            assert within(rank.residual, beta * (residual + rank.update).double(), 4 * EPS * scale)
        assert torch.equal(team.first.shared, shared)
        assert torch.equal(_owned(team), owned)
        assert [rank.updates.session.steps for rank in team.ranks] == steps
        _assert_in_step(team)
        balance.note()
        assert balance.holds()
    team.network.corrupt = None
    for _ in range(2):
        balance.round()
        assert balance.holds()
        _assert_in_step(team)
    assert not torch.equal(team.first.shared, shared)


def _owned(team: Team) -> Tensor:
    """What owners of shards hold back."""
    return team.owed() - torch.stack([rank.residual.double() for rank in team.ranks]).sum(dim=0)


@pytest.mark.parametrize("decay", [1.0, DECAY])
def test_a_narrow_residual_is_deferred_as_well(decay: float) -> None:
    scheme = replace(TOP_K, memory=sw.ErrorFeedback("bfloat16", decay))
    team = Team(scheme, 2, every=2, step_ahead=0.5)
    assert team.round() is None
    before = [rank.residual for rank in team.ranks]
    team.network.corrupt = 0
    assert isinstance(team.round(), sw.errors.CorruptMessageError)
    for rank, residual in zip(team.ranks, before, strict=True):
        total = decay * (residual + rank.update)
        torch.testing.assert_close(rank.residual, total, rtol=2.0**-6, atol=1e-6)
    _assert_in_step(team)


def test_a_deferred_update_is_sent_in_the_next_round() -> None:
    """With numbers that never round, the end is that of a round that computed both updates."""

    def make(every: int) -> Team:
        shapes, values = {"x": (40,)}, {"x": torch.zeros(40)}
        scheme = sw.Scheme(sw.TopK(0.2), dense_below=0, dense_1d=False)
        return Team(scheme, 2, sgd(0.25), every=every, shapes=shapes, values=values, pull=_exact)

    broken, whole = make(1), make(2)
    broken.network.corrupt = 0
    assert isinstance(broken.round(), sw.errors.CorruptMessageError)
    broken.network.corrupt = None
    assert broken.round() is None
    assert whole.round() is None
    assert torch.equal(broken.first.shared, whole.first.shared)
    assert torch.equal(broken.owed(), whole.owed())


@pytest.mark.parametrize("told", [False, True], ids=["in the weights", "in a gradient"])
@pytest.mark.parametrize("scheme", FEW, ids=label)
def test_a_non_finite_update_rolls_back_on_all_ranks(scheme: sw.Scheme, told: bool) -> None:
    team = Team(scheme, 3, every=2, step_ahead=0.5)
    assert team.round() is None
    shared, owed = team.first.shared, team.owed()
    live = [rank.live for rank in team.ranks]
    team.train()
    if told:
        team.ranks[1].updates.bad = "matrix"
    else:
        with torch.no_grad():
            team.ranks[1].updates.weights.parameters["matrix"].view(-1)[5] = float("inf")
    found = team.exchange()
    assert isinstance(found, NonFinite)
    assert dict(found.parameters).get(1) == "matrix"
    assert torch.equal(team.first.shared, shared)
    assert torch.equal(team.owed(), owed)
    _assert_in_step(team)
    for rank, before in zip(team.ranks, live, strict=True):
        assert torch.equal(rank.live, before)
        assert rank.updates.session.steps == 1
        assert rank.updates.session.counters.skipped == 1
    assert team.round() is None
    assert not torch.equal(team.first.shared, shared)


def test_a_corrupt_status_breaks_the_group() -> None:
    """A rank cannot know what the others decided: no rank goes on, and nothing is deferred."""
    team = Team(TOP_K, 3)
    assert team.round() is None
    before = [rank.residual for rank in team.ranks]
    team.network.corrupt = team.network.count - 1
    with pytest.raises(sw.errors.ExchangeError, match=r"status of rank 0 .* the group is broken"):
        team.round()
    for rank, residual in zip(team.ranks, before, strict=True):
        assert torch.equal(rank.residual, residual)
    team.network.corrupt = None
    with pytest.raises(sw.errors.ExchangeError, match="this group is broken"):
        team.round()


def test_a_non_finite_update_is_not_deferred() -> None:
    crew = Crew(TOP_K, 1)
    session, flat = crew.sessions[0], noise(1, crew.size, 0)[0]
    crew.exchange([flat])
    before = crew.remembered(0)
    transaction = session.begin()
    flat[5] = float("nan")
    unit = transaction.unit(0, SHAPES, flat.dtype, flat.device, flat)
    crew.group.drive([transaction.exchange(unit)], crew.all_counters)
    transaction.defer()
    assert torch.equal(crew.remembered(0), before)


# -- buffers -------------------------------------------------------------------------------------

BUFFERS = {
    "mean": torch.zeros(5),
    "seen": torch.zeros((), dtype=torch.int64),
    "mask": torch.zeros(3, dtype=torch.bool),
    "none": torch.zeros(0),
    "narrow": torch.zeros(3, dtype=torch.bfloat16),
    "wide": torch.zeros(2, 2, dtype=torch.float64),
}


@pytest.mark.parametrize("machines", [None, 2])
@pytest.mark.parametrize("is_delayed", [False, True])
def test_ranks_take_the_buffers_of_the_first(is_delayed: bool, machines: int | None) -> None:
    team = Team(TOP_K, 4, buffers=BUFFERS, is_delayed=is_delayed, machines=machines)
    for number in range(3):
        for rank in team.ranks:
            for name, buffer in rank.model.named_buffers():
                if name != "mask":
                    buffer.add_(10 * number + rank.number)
        expected = {name: b.clone() for name, b in team.first.model.named_buffers()}
        assert team.round() is None
        assert team.finish() is None
        for rank in team.ranks:
            for name, buffer in rank.model.named_buffers():
                assert torch.equal(buffer, expected[name]), name


def test_buffers_stay_as_they_are_while_an_exchange_is_under_way() -> None:
    """Backward reads what forward saw, and the first rank's later steps count."""
    team = Team(TOP_K, 2, buffers={"mean": torch.zeros(4)}, is_delayed=True)
    layers = [nn.BatchNorm1d(4) for _ in team.ranks]
    assert team.round() is None
    routines = [rank.updates.exchange() for rank in team.ranks]
    losses = []
    for rank, layer in zip(team.ranks, layers, strict=True):
        layer.running_mean = rank.model.get_buffer("mean")
        losses.append(layer(torch.randn(8, 4, requires_grad=True)).square().sum())
    now = [layer.running_mean.clone() for layer in layers if layer.running_mean is not None]
    counters = [rank.updates.session.counters for rank in team.ranks]
    ends = team.network.drive(routines, counters)
    for loss, layer, held in zip(losses, layers, now, strict=True):
        loss.backward()
        assert layer.running_mean is not None
        assert torch.equal(layer.running_mean, held)
    for rank, end in zip(team.ranks, ends, strict=True):
        with torch.no_grad():
            rank.updates.apply(*end)
    assert torch.equal(team.first.model.get_buffer("mean"), now[0])
    assert torch.equal(team.ranks[1].model.get_buffer("mean"), torch.ones(4))
