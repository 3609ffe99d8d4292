"""The exchange: headers before payloads, state, and parameters that nobody used."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.codecs import ValueCodec
from sparsewire.counters import STAGES, Counters
from sparsewire.exchange import Call, Exchange, Finding, NonFinite
from sparsewire.groups.simulated import answer_all
from sparsewire.message import CHECKSUM_BYTES, HEADER_BYTES, Header, bytes_with_checksum
from sparsewire.requests import Request, Routine, Start, all_gather, broadcast
from sparsewire.selectors import Selector
from sparsewire.state import RESIDUAL, StateStore, StepState
from sparsewire.workspace import Workspace

from .laws.cases import CPU, Crew, examples, label, noise

SHAPES = {"w": (10, 10), "b": (10,)}
SCHEME = sw.Scheme(sw.TopK(0.1), dense_below=50)


def exchange_of(scheme: sw.Scheme = SCHEME, world_size: int = 1, **options: Any) -> Exchange:
    return Exchange(scheme, scheme.partition(SHAPES), world_size, **options)


def start(
    exchange: Exchange,
    call: Call,
    gradient: Tensor,
    counters: Counters | None = None,
    work: Workspace | None = None,
) -> Routine[Finding]:
    """One rank's exchange with nothing kept from before."""
    store = StateStore(exchange.scheme.fields, SHAPES)
    state = store.open(0, exchange.fields(call.rank), exchange.dtype, CPU)
    return exchange.run(gradient, state, call, counters or Counters(), work or Workspace())


def look(crew: Crew, rank: int) -> StepState:
    """The tensors that a rank's next step will read and write."""
    store, exchange = crew.stores[rank], crew.next_exchange
    state = store.open(0, exchange.fields(rank), exchange.kept_as, CPU)
    store.discard()
    return state


class TestOneRank:
    """Seen from one rank, request by request."""

    def test_header_goes_ahead(self) -> None:
        exchange = exchange_of()
        run = start(exchange, Call(3, 0, bucket=2), torch.ones(110))
        request = next(run)
        assert request.op == "all_gather"
        assert request.payload.numel() == HEADER_BYTES
        header = Header.unpack(request.payload, 0)
        assert (header.step, header.bucket, header.length) == (3, 2, exchange.layout.nbytes)
        payload = run.send([request.payload])
        assert payload.op == "all_gather"
        assert payload.payload.numel() == exchange.layout.nbytes

    def test_header_goes_once_a_step(self) -> None:
        exchange, work = exchange_of(), Workspace()
        calls = {Call(0, 0): True, Call(0, 0, bucket=1, opens=False): False, Call(1, 0): True}
        for call, has_header in calls.items():
            run = start(exchange, call, torch.ones(110), work=work)
            request = next(run)
            assert (request.payload.numel() == HEADER_BYTES) is has_header
            if has_header:
                request = run.send([request.payload])
            assert request.payload.numel() == exchange.layout.nbytes
            with pytest.raises(StopIteration):
                run.send([request.payload])

    def test_message_is_indices_then_values_then_padding(self) -> None:
        gradient = torch.zeros(110)
        gradient[[3, 7, 50]] = torch.tensor([1.0, -2.0, 3.0])
        gradient[105] = 9.0  # of the bias, which is sent densely
        scheme = sw.Scheme(
            sw.TopK(count=3), values=sw.Float16(), indices=sw.Int32(), dense_below=50
        )
        exchange = exchange_of(scheme)
        run = start(exchange, Call(0, 0), gradient)
        data = run.send([next(run).payload]).payload
        assert data[:12].view(torch.int32).tolist() == [3, 7, 50]
        assert data[12:38].view(torch.float16).tolist() == [1, -2, 3] + [0] * 5 + [9] + [0] * 4
        layout = exchange.layout
        assert (layout.index_bytes, layout.value_bytes, layout.padding_bytes) == (12, 26, 2)
        assert not data[38:40].any()
        assert data.numel() == 40 + CHECKSUM_BYTES

    def test_sums_carry_numbers_in_the_codecs_type(self) -> None:
        exchange = exchange_of(sw.Scheme(sw.RandomK(0.1), values=sw.BFloat16(), dense_below=50), 2)
        run, other = (start(exchange, Call(0, rank), torch.ones(110)) for rank in range(2))
        step = run.send([next(run).payload, next(other).payload])
        assert isinstance(step, Start)
        assert step.request.op == "all_to_all"
        # 10 of the 20 values for each of two ranks, and a digest
        assert step.request.payload.shape == (2, bytes_with_checksum(2 * 10))

    def test_gradient_is_only_written_at_the_end(self) -> None:
        (gradient,) = noise(1, 110, 0)
        kept = gradient.clone()
        run = start(exchange_of(), Call(0, 0), gradient)
        request = run.send([next(run).payload])
        assert torch.equal(gradient, kept)
        with pytest.raises(StopIteration):
            run.send([request.payload])
        assert not torch.equal(gradient, kept)


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (exchange_of(sw.Scheme(sw.TopK(0.2), dense_below=50), 3), "the scheme"),
        (exchange_of(sw.Scheme(sw.TopK(0.1), dense_below=50, seed=1), 3), "the scheme"),
        (exchange_of(world_size=3, skips_unused=True), "the scheme"),
        (exchange_of(world_size=3, dtype=torch.float64), "shapes or types"),
    ],
)
def test_ranks_that_differ_are_named_before_any_payload(odd: Exchange, reason: str) -> None:
    exchanges = [exchange_of(world_size=3), exchange_of(world_size=3), odd]
    all_counters = [Counters() for _ in exchanges]
    runs = [
        start(exchange, Call(0, rank), torch.ones(110, dtype=exchange.dtype), all_counters[rank])
        for rank, exchange in enumerate(exchanges)
    ]
    for outcome in sw.groups.SimulatedGroup(3).outcomes(runs, all_counters):
        with pytest.raises(sw.errors.DisagreementError, match=f"rank 2 of 3 disagrees .*{reason}"):
            raise outcome
    assert all(counters.bytes_sent == 2 * HEADER_BYTES for counters in all_counters)


def test_ranks_at_different_steps_are_named() -> None:
    exchange = exchange_of(world_size=3)
    runs = [start(exchange, Call(step, r), torch.ones(110)) for r, step in enumerate([6, 5, 6])]
    with pytest.raises(
        sw.errors.DisagreementError, match=r"rank 1 of 3 .* the step \(5 instead of 6\)"
    ):
        sw.groups.SimulatedGroup(3).drive(runs, [Counters() for _ in runs])


def test_before_is_never_written() -> None:
    crew = Crew("Scheme(TopK(0.1), values=Float16(), collective=Sharded(), dense_below=64)", 2)
    crew.exchange(noise(2, crew.size, 0))
    states = [look(crew, rank) for rank in range(2)]
    kept = [{key: held.clone() for key, held in state.before.items()} for state in states]
    crew.exchange(noise(2, crew.size, 1))
    for rank, state in enumerate(states):
        for key, held in state.before.items():
            assert look(crew, rank).after[key] is held  # they have changed places since
            assert torch.equal(held, kept[rank][key])
            assert not torch.equal(held, look(crew, rank).before[key])


def test_times_are_counted_by_stage() -> None:
    crew = Crew(sw.Scheme(sw.TopK(0.1), dense_below=64), 2)
    crew.exchange(noise(2, crew.size, 0))
    seconds = crew.all_counters[0].seconds
    assert set(seconds) == set(STAGES)
    assert all(seconds[stage] > 0 for stage in ("select", "encode", "decode"))


def test_norms_are_noted_by_parameter() -> None:
    crew = Crew("TopK(0.1)", 1, {"a": (2,), "b": (3,), "none": (0,)})
    crew.exchange([torch.tensor([3.0, 4.0, 1.0, 2.0, 2.0])])
    squares = crew.all_counters[0].gradient_squares
    assert squares == pytest.approx({"a": 25, "b": 9, "none": 0})


def test_verdict_reads_well() -> None:
    assert str(NonFinite({1: "w", 3: "b"})) == "rank 1 in w; rank 3 in b"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("codec", examples("values"), ids=label)
def test_room_that_is_left_changes_nothing(codec: ValueCodec, world_size: int) -> None:
    """A threshold leaves room in every message: what is read there, from the spare slot of a
    residual, must not come back."""
    scheme = sw.Scheme(sw.Threshold(0.1), values=codec, dense_below=50)
    crew = Crew(scheme, world_size, {"x": (40, 40), "bias": (10,)})
    (segment,) = crew.segments.sparse
    assert segment.capacity > segment.count
    for step in range(12):
        crew.exchange(noise(world_size, crew.size, step))
        for rank in range(world_size):
            state = look(crew, rank)
            assert not state.before[RESIDUAL][crew.size :].any()
            assert not state.after[RESIDUAL][crew.size :].any()
    assert crew.owed().abs().max() < 1000


class TestUnusedParameters:
    """With `find_unused_parameters`, DDP leaves alone what no rank used, so we must too."""

    shapes: ClassVar = {"used": (10, 10), "idle": (10, 10), "bias": (10,)}

    def crew(self, selector: Selector, skips_unused: bool = True, **options: Any) -> Crew:
        scheme = sw.Scheme(selector, dense_below=50, **options)
        return Crew(scheme, 2, self.shapes, skips_unused=skips_unused)

    def gradients(self, step: int, idle_on: tuple[int, ...]) -> list[Tensor]:
        """Random, but zero in `idle` and `bias` on these ranks."""
        found = noise(2, 210, step)
        for rank in idle_on:
            found[rank][100:] = 0
        return found

    @pytest.mark.parametrize("scope", ["layer", "global", 30])
    @pytest.mark.parametrize("selector", examples("selectors"), ids=label)
    def test_nothing_moves_where_no_rank_has_a_gradient(
        self, selector: Selector, scope: object
    ) -> None:
        crew = self.crew(selector, scope=scope, memory=sw.MomentumCorrection(0.5))
        crew.exchange(self.gradients(0, ()))
        kept = [[crew.remembered(r, f) for f in ("residual", "velocity")] for r in range(2)]
        for mean in crew.exchange(self.gradients(1, (0, 1))):
            assert not mean[100:].any()
            assert mean[:100].any()
        for rank in range(2):
            for field, was in zip(("residual", "velocity"), kept[rank], strict=True):
                assert torch.equal(crew.remembered(rank, field)[100:], was[100:])

    @pytest.mark.parametrize("scope", ["layer", "global", 30])
    @pytest.mark.parametrize("codec", examples("values"), ids=label)
    def test_nothing_moves_though_codecs_read_zeros_as_something_else(
        self, codec: ValueCodec, scope: object
    ) -> None:
        crew = self.crew(sw.RandomK(0.3), values=codec, scope=scope)
        crew.exchange(self.gradients(0, ()))
        kept = [crew.remembered(rank) for rank in range(2)]
        for mean in crew.exchange(self.gradients(1, (0, 1))):
            assert not mean[100:].any()
            assert mean[:100].any()
        assert all(torch.equal(crew.remembered(r)[100:], kept[r][100:]) for r in range(2))

    @pytest.mark.parametrize("selector", examples("selectors"), ids=label)
    def test_one_rank_with_a_gradient_is_enough(self, selector: Selector) -> None:
        watchful, plain = self.crew(selector), self.crew(selector, skips_unused=False)
        for step, idle in enumerate([(), (0,), (1,)]):
            gradients = self.gradients(step, idle)
            assert torch.equal(watchful.exchange(gradients)[0], plain.exchange(gradients)[0])
            assert torch.equal(watchful.owed(), plain.owed())

    def test_tiny_gradients_count_as_gradients(self) -> None:
        crew = self.crew(sw.Dense())
        mean = crew.exchange([torch.full((210,), 1e-25)] * 2)[0]
        assert mean.all()


GATHER = all_gather(torch.zeros(4, dtype=torch.uint8))
SPREAD = broadcast(GATHER.payload, 0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (GATHER, all_gather(torch.zeros(5, dtype=torch.uint8))),
        (GATHER, all_gather(GATHER.payload, group="status")),
        (GATHER, SPREAD),
        (SPREAD, broadcast(SPREAD.payload, 1)),
    ],
)
def test_answers_must_be_asked_for_alike(one: Request, other: Request) -> None:
    with pytest.raises(sw.errors.DisagreementError, match="different things"):
        answer_all([one, other])
