"""The engine: headers before payloads, transactions, and parameters that nobody used."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.desk import Call
from sparsewire.engine import Exchange, Finding, Unsound
from sparsewire.groups import Alone, drive
from sparsewire.groups.simulated import results_of
from sparsewire.ledger import Ledger
from sparsewire.message import DIGEST_BYTES, HEADER_BYTES, Header, sealed_bytes
from sparsewire.meter import STAGES, Meter
from sparsewire.requests import Routine, Start, all_gather, broadcast
from sparsewire.selectors import Selector
from sparsewire.values import ValueCodec
from sparsewire.workspace import Workspace

from .laws.cases import CPU, Crew, examples, label, noise

SHAPES = {"w": (10, 10), "b": (10,)}
SCHEME = sw.Scheme(sw.TopK(0.1), whole=50)


def start(
    engine: Exchange, call: Call, gradient: Tensor, meter: Meter | None = None
) -> Routine[Finding]:
    """One rank's exchange with an empty memory."""
    ledger = Ledger(engine.scheme.memory.fields, SHAPES)
    before, after = ledger.open(0, engine.segments, engine.dtype, CPU)
    return engine.run(gradient, before, after, call, meter or Meter(), Workspace())


def engine_of(scheme: sw.Scheme) -> Exchange:
    return Exchange(scheme, scheme.cut(SHAPES))


class TestOneRank:
    """Seen from one rank, request by request."""

    def test_header_goes_ahead(self) -> None:
        engine = engine_of(SCHEME)
        run = start(engine, Call(3, 0, 1, bucket=2), torch.ones(110))
        request = next(run)
        assert request.op == "all_gather"
        assert request.payload.numel() == HEADER_BYTES
        header = Header.unpack(request.payload, 0)
        assert (header.step, header.bucket, header.length) == (3, 2, engine.message_bytes)
        payload = run.send([request.payload])
        assert payload.op == "all_gather"
        assert payload.payload.numel() == engine.message_bytes

    def test_message_is_indices_then_values_then_padding(self) -> None:
        gradient = torch.zeros(110)
        gradient[[3, 7, 50]] = torch.tensor([1.0, -2.0, 3.0])
        gradient[105] = 9.0  # of the bias, which travels whole
        scheme = sw.Scheme(sw.TopK(count=3), values=sw.Float16(), indices=sw.Int32(), whole=50)
        engine = engine_of(scheme)
        run = start(engine, Call(0, 0, 1), gradient)
        data = run.send([next(run).payload]).payload
        assert data[:12].view(torch.int32).tolist() == [3, 7, 50]
        assert data[12:38].view(torch.float16).tolist() == [1, -2, 3] + [0] * 5 + [9] + [0] * 4
        assert (engine.form.index_bytes, engine.form.value_bytes, engine.form.padding_bytes) == (
            12,
            26,
            2,
        )
        assert not data[38:40].any()
        assert data.numel() == 40 + DIGEST_BYTES

    def test_sums_carry_numbers_in_the_codecs_type(self) -> None:
        engine = engine_of(sw.Scheme(sw.RandomK(0.1), values=sw.BFloat16(), whole=50))
        run = start(engine, Call(0, 0, 2), torch.ones(110))
        header = next(run).payload
        other = engine._header(Call(0, 1, 2)).pack()
        step = run.send([header, other])
        assert isinstance(step, Start)
        assert step.request.op == "all_to_all"
        # 10 of the 20 values for each of two ranks, and a digest
        assert step.request.payload.shape == (2, sealed_bytes(2 * 10))

    def test_gradient_is_only_written_at_the_end(self) -> None:
        (gradient,) = noise(1, 110, 0)
        kept = gradient.clone()
        run = start(engine_of(SCHEME), Call(0, 0, 1), gradient)
        request = run.send([next(run).payload])
        assert torch.equal(gradient, kept)
        with pytest.raises(StopIteration):
            run.send([request.payload])
        assert not torch.equal(gradient, kept)


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (engine_of(sw.Scheme(sw.TopK(0.2), whole=50)), "the scheme"),
        (engine_of(sw.Scheme(sw.TopK(0.1), whole=50, seed=1)), "the scheme"),
        (replace(engine_of(SCHEME), skips_unused=True), "the scheme"),
        (replace(engine_of(SCHEME), dtype=torch.float64), "shapes or types"),
    ],
)
def test_ranks_that_differ_are_named_before_any_payload(odd: Exchange, reason: str) -> None:
    engines = [engine_of(SCHEME), engine_of(SCHEME), odd]
    meters = [Meter() for _ in engines]
    runs = [
        start(engine, Call(0, rank, 3), torch.ones(110, dtype=engine.dtype), meters[rank])
        for rank, engine in enumerate(engines)
    ]
    with pytest.raises(sw.DisagreementError, match=f"rank 2 of 3 disagrees .*{reason}"):
        sw.SimulatedGroup(3).drive(runs, meters)
    assert all(meter.bytes_sent == 2 * HEADER_BYTES for meter in meters)


def test_ranks_at_different_steps_are_named() -> None:
    engine = engine_of(SCHEME)
    runs = [start(engine, Call(step, r, 3), torch.ones(110)) for r, step in enumerate([6, 5, 6])]
    with pytest.raises(sw.DisagreementError, match=r"rank 1 of 3 .* the step \(5 instead of 6\)"):
        sw.SimulatedGroup(3).drive(runs, [Meter() for _ in runs])


def test_before_is_never_written() -> None:
    crew = Crew(sw.Scheme(sw.TopK(0.1), values=sw.Float16(), whole=64), 2)
    crew.exchange(noise(2, crew.size, 0))
    engine = crew.engine
    opened = [ledger.open(0, engine.segments, torch.float32, CPU) for ledger in crew.ledgers]
    kept = [before["residual"].clone() for before, _ in opened]
    for ledger in crew.ledgers:
        ledger.discard()
    crew.exchange(noise(2, crew.size, 1))
    for (_, after), was in zip(opened, kept, strict=True):
        assert torch.equal(after["residual"], was)  # they have changed places since


def test_times_are_counted_by_stage() -> None:
    crew = Crew(sw.Scheme(sw.TopK(0.1), whole=64), 2)
    crew.exchange(noise(2, crew.size, 0))
    seconds = crew.meters[0].seconds
    assert set(seconds) == set(STAGES)
    assert all(seconds[stage] > 0 for stage in ("select", "encode", "decode"))


def test_norms_are_noted_by_parameter() -> None:
    crew = Crew("TopK(0.1)", 1, {"a": (2,), "b": (3,), "none": (0,)})
    crew.exchange([torch.tensor([3.0, 4.0, 1.0, 2.0, 2.0])])
    squares = crew.meters[0].gradient_squares
    assert squares == pytest.approx({"a": 25, "b": 9, "none": 0})


def test_verdict_reads_well() -> None:
    assert str(Unsound({1: "w", 3: "b"})) == "rank 1 in w; rank 3 in b"


@pytest.mark.parametrize("codec", examples("values"), ids=label)
def test_room_that_is_left_changes_nothing(codec: ValueCodec) -> None:
    """A threshold leaves room in every message: what is read there must not come back."""
    crew = Crew(sw.Scheme(sw.Threshold(0.1), values=codec, whole=None), 2, {"x": (40, 40)})
    (piece,) = crew.engine.segments.pieces
    assert piece.room > piece.count
    for step in range(12):
        engine = crew.engine
        crew.exchange(noise(2, 1600, step))
        for ledger in crew.ledgers:
            before, after = ledger.open(0, engine.segments, torch.float32, CPU)
            ledger.discard()
            assert not before["residual"][-1]
            assert not after["residual"][-1]
    assert crew.owed().abs().max() < 1000


class TestUnusedParameters:
    """With `find_unused_parameters`, DDP leaves alone what no rank used, so we must too."""

    shapes: ClassVar = {"used": (10, 10), "idle": (10, 10), "bias": (10,)}

    def crew(self, selector: Selector, **options: object) -> Crew:
        scheme = sw.Scheme(selector, whole=50, **options)  # type: ignore[arg-type]
        return Crew(scheme, 2, self.shapes, skips_unused=True)

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
        watchful, plain = self.crew(selector), self.crew(selector)
        plain.skips_unused = False
        for step, idle in enumerate([(), (0,), (1,)]):
            gradients = self.gradients(step, idle)
            assert torch.equal(watchful.exchange(gradients)[0], plain.exchange(gradients)[0])
            assert torch.equal(watchful.owed(), plain.owed())

    def test_tiny_gradients_count_as_gradients(self) -> None:
        crew = self.crew(sw.Dense())
        mean = crew.exchange([torch.full((210,), 1e-25)] * 2)[0]
        assert mean.all()


def test_answers_must_be_asked_for_alike() -> None:
    gather = all_gather(torch.zeros(4, dtype=torch.uint8))
    others = (
        all_gather(torch.zeros(5, dtype=torch.uint8)),
        broadcast(torch.zeros(4, dtype=torch.uint8), 0),
        Start(gather),
    )
    for other in others:
        with pytest.raises(sw.DisagreementError, match="different things"):
            results_of([gather, other])


@pytest.mark.parametrize("values", examples("values"), ids=label)
def test_nothing_piles_up_nowhere(values: ValueCodec) -> None:
    """The spare slot of a ledger is read for room that is not used, so it must stay zero."""
    scheme = sw.Scheme(sw.Threshold(0.1), values=values, whole=50)
    engine = engine_of(scheme)
    ledger = Ledger(scheme.memory.fields, SHAPES)
    for step in range(3):
        before, after = ledger.open(0, engine.segments, torch.float32, CPU)
        gradient = torch.randn(110, generator=torch.Generator().manual_seed(step))
        run = engine.run(gradient, before, after, Call(step, 0, 1), Meter(), Workspace())
        drive(run, Alone(), Meter())
        assert not after["residual"][110:].any()
        ledger.commit()
