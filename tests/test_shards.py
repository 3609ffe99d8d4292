"""Who owns which coordinates: everything once, fairly, and by the parameter's name alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.kernels import reference
from sparsewire.segments import ParamSlice, Segments
from sparsewire.shards import BLOCK, Shards, owned, owners
from sparsewire.state import OWNED, RESIDUAL, StateStore
from sparsewire.workspace import Workspace

from .laws.cases import CPU, SCOPES, SHAPES, Crew, noise, owned_places, random_key

WORLDS = (1, 2, 3, 5, 8)
LARGE = {"a": (300, 400), "b": (50,), "c": (7, 100), "d": (1000, 100)}


def shards(
    world_size: int,
    selector: sw.TopK | sw.Threshold | sw.BlockRandomK | None = None,
    shapes: dict[str, tuple[int, ...]] = LARGE,
    scope: object = "layer",
    ratio: float | None = None,
) -> Shards:
    selector = selector or sw.TopK(0.01)
    segments = Segments.partition(shapes, selector, scope, 64)  # type: ignore[arg-type]
    return Shards(segments, world_size, ratio, selector.clustered)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("shapes", [SHAPES, LARGE, {"x": (1,)}, {"x": (0,)}])
def test_every_coordinate_has_one_owner(
    world_size: int, shapes: dict[str, tuple[int, ...]]
) -> None:
    shared = shards(world_size, shapes=shapes)
    places = [
        reference.collect(torch.arange(shared.part(owner).size), owner, shared, Workspace())
        for owner in range(world_size)
    ]
    assert all((place.diff() > 0).all() for place in places)
    assert torch.cat(places).sort().values.tolist() == list(range(shared.segments.size))


@pytest.mark.parametrize("world_size", WORLDS)
def test_owners_have_equal_shares(world_size: int) -> None:
    for length in (1, BLOCK, 1000, 123_456):
        sizes = [owned("w", length, owner, world_size) for owner in range(world_size)]
        assert sum(sizes) == length
        assert max(sizes) - min(sizes) <= BLOCK


@pytest.mark.parametrize("world_size", WORLDS)
def test_owners_by_coordinate(world_size: int) -> None:
    for length in (0, 1, 1000):
        who = owners("w", length, world_size)
        for owner in range(world_size):
            places = owned_places(ParamSlice("w", (length,), 0), owner, world_size)
            assert (who == owner).nonzero().flatten().tolist() == places


def test_who_owns_what_does_not_depend_on_the_layout() -> None:
    """DDP lays parameters out anew after the first step."""
    for scope in SCOPES:
        one, other = (
            shards(3, shapes=dict(order), scope=scope)
            for order in (LARGE.items(), reversed(LARGE.items()))
        )
        for param in one.segments.params:
            moved = next(s for s in other.segments.params if s.name == param.name)
            for owner in range(3):
                here, there = (
                    reference.collect(torch.arange(s.part(owner).size), owner, s, Workspace())
                    for s in (one, other)
                )
                inside = here[(here >= param.start) & (here < param.stop)] - param.start
                again = there[(there >= moved.start) & (there < moved.stop)] - moved.start
                assert torch.equal(inside, again)
                assert inside.tolist() == owned_places(param, owner, 3)


@pytest.mark.parametrize("stride", [1, 8, BLOCK, 64, 128, 4096])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_busy_columns_and_rows_fall_on_all_owners(stride: int, world_size: int) -> None:
    """Whatever period the large entries have, no owner gets more than there is room for."""
    shared = shards(world_size, sw.TopK(0.01), {"w": (1024, 512)})
    count = shared.segments.capacity
    indices = torch.arange(count) * stride % shared.segments.size
    indices = indices.unique()
    _, sources = reference.deal(indices, shared, Workspace())
    assert (sources < indices.numel()).sum() >= 0.98 * indices.numel()


def test_a_block_always_finds_room() -> None:
    selector = sw.BlockRandomK(0.01)
    for world_size in WORLDS:
        shared = shards(world_size, selector)
        for step in range(50):
            indices = selector.coordinates(shared.segments, random_key(step), CPU, Workspace())
            _, sources = reference.deal(indices, shared, Workspace())
            assert (sources < indices.numel()).sum() == indices.numel()


def on_one_owner(world_size: int, owner: int) -> Callable[[int], Tensor]:
    """Gradients whose large entries all belong to one owner."""
    param = Segments.partition(LARGE, sw.TopK(0.01)).params[0]

    def gradient(size: int) -> Tensor:
        flat = noise(1, size, 7)[0] * 1e-3
        flat[owned_places(param, owner, world_size)] *= 1e6
        return flat

    return gradient


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_what_one_owner_has_no_room_for_is_late_and_not_lost(world_size: int) -> None:
    crew = Crew("Scheme(TopK(0.01), collective=Sharded())", world_size, LARGE)
    gradient = on_one_owner(world_size, 1)(crew.size)
    mean = crew.exchange([gradient] * world_size)[0]
    assert 0 < (mean[:120_000] != 0).sum() < 1200
    owed = crew.owed()
    assert torch.allclose(world_size * mean.double() + owed, world_size * gradient.double())
    for _ in range(40):
        mean = mean + crew.exchange([torch.zeros(crew.size)] * world_size)[0]
    assert crew.owed().norm() < 0.75 * owed.norm()


@pytest.mark.parametrize("world_size", [2, 4, 7])
@pytest.mark.parametrize("scheme", ["TopK(0.02)", "Threshold(0.02)", "RandomK(0.02, shared=False)"])
def test_sending_back_all_that_arrived_is_an_all_gather(world_size: int, scheme: str) -> None:
    """To the last bit, as long as every entry finds a slot."""
    gathered = Crew(f"Scheme({scheme}, collective=AllGather())", world_size, LARGE)
    sharded = Crew(f"Scheme({scheme}, collective=Sharded(1.0))", world_size, LARGE)
    for step in range(3):
        gradients = noise(world_size, gathered.size, step)
        assert torch.equal(gathered.exchange(gradients)[0], sharded.exchange(gradients)[0])
    assert not sharded.owned().any()
    dense = 4 * sharded.size / world_size
    assert sharded.next_exchange.plan.message_bytes["pull"] < dense / 2


@pytest.mark.parametrize(("ratio", "most"), [("", 0.0125), ("0.2", 0.2), ("0.002", 0.00201)])
def test_owners_send_back_the_ratio_that_they_are_told(ratio: str, most: float) -> None:
    crew = Crew(
        f"Scheme(TopK(0.01), collective=Sharded({ratio}), dense_below=0, dense_1d=False)", 4, LARGE
    )
    mean = crew.exchange(noise(4, crew.size, 0))[0]
    share = float((mean != 0).sum()) / crew.size
    aimed = float(ratio or 0.01)
    assert min(aimed, 0.035) <= share <= most + 4 * 4 / crew.size
    assert bool(crew.owned().any()) is (aimed < 0.2)


def test_owners_remember_what_they_do_not_send() -> None:
    crew = Crew("Scheme(TopK(0.01), collective=Sharded())", 4, LARGE)
    crew.exchange(noise(4, crew.size, 0))
    for rank, store in enumerate(crew.stores):
        kept = store.get("a")[OWNED]
        assert kept.shape == (owned("a", 120_000, rank, 4),)
        assert kept.any()


@pytest.mark.parametrize("world_size", [3, 8])
def test_fewer_entries_than_owners(world_size: int) -> None:
    crew = Crew(
        "Scheme(TopK(count=2), collective=Sharded(), dense_below=0, dense_1d=False)",
        world_size,
        {"x": (40,)},
    )
    sent = torch.zeros(40, dtype=torch.float64)
    gradients = noise(world_size, 40, 0)
    for step in range(60):
        zeros = [torch.zeros(40)] * world_size
        sent += crew.exchange(gradients if step == 0 else zeros)[0].double()
    assert torch.allclose(sent, torch.stack(gradients).double().mean(dim=0), atol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "words"), [(0, "above 0"), (1.5, "at most 1"), ("x", "share of"), (True, "share of")]
)
def test_a_pull_ratio_that_makes_no_sense_is_refused(ratio: object, words: str) -> None:
    with pytest.raises(sw.errors.SchemeError, match=words):
        sw.Sharded(pull_ratio=ratio)  # type: ignore[arg-type]


def test_traffic_does_not_grow_with_the_number_of_workers() -> None:
    """At 1 % it is flat from 8 workers on, and under 2.6 times what a rank selects."""
    shapes = {"w1": (4096, 784), "w2": (4096, 4096), "w3": (4096, 4096), "w4": (10, 4096)}
    for scheme in ("TopK(0.01)", "Threshold(0.01)"):
        sharded = f"Scheme({scheme}, collective=Sharded())"
        sent = {w: sw.explain(sharded, shapes, w).sent_bytes for w in (2, 4, 8, 16, 64, 256)}
        message = sw.explain(scheme, shapes, 2).sent_bytes
        assert max(sent[w] for w in (8, 16, 64, 256)) < 1.15 * sent[8]
        assert all(n <= 2.6 * message for n in sent.values())
        gathered = sw.explain(scheme, shapes, 8).sent_bytes
        assert gathered > 2.5 * sent[8]


def test_a_report_counts_what_owners_hold_back() -> None:
    crew = Crew("Scheme(TopK(0.5), collective=Sharded(0.0005))", 2, LARGE)
    for step in range(3):
        crew.exchange(noise(2, crew.size, step))
    kept = crew.stores[0].get("a")
    both = sum(float(tensor.double().square().sum()) for tensor in kept.values())
    assert crew.stores[0].squared_norms()["a"] == pytest.approx(both)
    assert kept[OWNED].norm() > kept[RESIDUAL].norm()


def test_owners_may_come_but_not_go_with_what_they_hold() -> None:
    fields, shapes = sw.ErrorFeedback.fields, {"w": (40,)}
    plain = StateStore(fields, shapes)
    owners = StateStore((*fields, *sw.Sharded.fields), shapes, rank=1, world_size=2)
    owners.load_state_dict({"w": {RESIDUAL: torch.ones(40)}})
    assert owners.state_dict()["w"][RESIDUAL].sum() == 40
    assert not owners.state_dict()["w"][OWNED].any()
    with pytest.raises(sw.errors.StateError, match="no owners: attach with collective=Sharded"):
        plain.load_state_dict(owners.state_dict())
    with pytest.raises(sw.errors.StateError, match="this rank owns"):
        owners.load_state_dict({"w": {RESIDUAL: torch.ones(40), OWNED: torch.ones(40)}})


def test_traffic_is_as_foretold_on_many_workers() -> None:
    crew = Crew("Scheme(TopK(0.02), collective=Sharded(), dense_below=64)", 64, SHAPES)
    crew.exchange(noise(64, crew.size, 0))
    assert {counters.bytes_sent for counters in crew.all_counters} == {crew.next_exchange.traffic}
