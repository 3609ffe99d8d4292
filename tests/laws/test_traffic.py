"""Sent bytes = predicted bytes: on the meter, in the requests themselves, and in `explain`."""

from __future__ import annotations

import pytest
import torch

import sparsewire as sw
from sparsewire.collectives.sums import reduce_traffic
from sparsewire.engine import Call, Finding, agree
from sparsewire.groups.simulated import results_of
from sparsewire.message import HEADER_BYTES, VERDICT_BYTES
from sparsewire.requests import Request, Routine, Start, Wait
from sparsewire.segments import Segments
from sparsewire.selectors import Coordination
from sparsewire.values import Place, ValueCodec

from .cases import SAMPLE, SHAPES, Crew, examples, label, noise


def _step(run: Routine[Finding], rank: int) -> Routine[None]:
    finding = yield from run
    yield from agree([finding], rank)


def requests_of(crew: Crew) -> list[Request]:
    """What rank 0 of a crew asks for in a step of one exchange."""
    engine = crew.engine
    runs = []
    for rank, gradient in enumerate(noise(crew.world, crew.size, 0)):
        shard = engine.shard(rank, crew.world)
        before, after = crew.ledgers[rank].open(
            0, engine.segments, crew.dtype, gradient.device, shard
        )
        call = Call(0, rank, crew.world)
        runs.append(
            _step(
                engine.run(gradient, before, after, call, crew.meters[rank], crew.work[rank]), rank
            )
        )
    asked: list[Request] = []
    answers: list[object] = [None] * crew.world
    while True:
        try:
            steps = [run.send(answer) for run, answer in zip(runs, answers, strict=True)]
        except StopIteration:
            return asked
        if not isinstance(steps[0], Wait):
            asked.append(steps[0].request if isinstance(steps[0], Start) else steps[0])
        answers = results_of(steps)


@pytest.mark.parametrize("scheme", SAMPLE, ids=label)
def test_meter_engine_and_explanation_agree(scheme: sw.Scheme) -> None:
    for world in (1, 2, 3):
        crew = Crew(scheme, world)
        crew.exchange(noise(world, crew.size, 0))
        predicted = crew.engine.traffic(world)
        assert sw.explain(scheme, SHAPES, world).sent_bytes == predicted
        for meter in crew.meters:
            assert meter.bytes_sent == meter.bytes_received == predicted
        assert (predicted == 0) == (world == 1)


@pytest.mark.parametrize("scheme", SAMPLE, ids=label)
@pytest.mark.parametrize("skips_unused", [False, True])
def test_requests_are_as_large_as_announced(scheme: sw.Scheme, skips_unused: bool) -> None:
    crew = Crew(scheme, 3, skips_unused=skips_unused)
    engine = crew.engine
    header, *others, verdict = requests_of(crew)
    flags, others = others[:skips_unused], others[skips_unused:]
    said_ahead = 1 if scheme.selector.proposers != "none" else 2  # a sum takes two
    if scheme.selector.coordination is not Coordination.NEGOTIATED:
        said_ahead = 0
    talk, payloads = others[:said_ahead], others[said_ahead:]
    assert verdict.payload.numel() == VERDICT_BYTES
    assert header.payload.numel() == HEADER_BYTES
    assert [flag.payload.numel() for flag in flags] == [len(SHAPES)] * skips_unused
    for said in talk:
        if scheme.selector.proposers != "none":
            carried = "broadcast" if scheme.selector.proposers == "leader" else "all_gather"
            assert said.op == carried
            assert said.payload.numel() == engine.notice_bytes(3)
    assert sum(said.traffic(3) for said in talk) == engine.talk_traffic(3)
    assert {payload.payload.dtype for payload in payloads} == {torch.uint8}
    if scheme.collective.adds:
        width = scheme.values.dtype.itemsize
        assert width * engine.value_count == engine.form.value_bytes
        count = reduce_traffic(engine.value_count, width, engine.sum_width, 3)
        assert sum(payload.traffic(3) for payload in payloads) == count
    elif scheme.collective.fields:
        assert payloads[0].payload.shape == (3, engine.push_bytes(3))
        assert payloads[1].payload.numel() == engine.pull_bytes(3)
    else:
        assert payloads[0].payload.numel() == engine.message_bytes
    total = sum(request.traffic(3) for request in (header, *flags, *talk, *payloads, verdict))
    assert total == engine.traffic(3)


@pytest.mark.parametrize("codec", examples("values"), ids=label)
@pytest.mark.parametrize("count", [1, 7, 8, 100])
@pytest.mark.parametrize("shapes", [{}, {"b": (5,)}, {"x": (101, 3)}, {"x": (101, 3), "b": (5,)}])
def test_value_codecs_write_what_they_announce(
    codec: ValueCodec, count: int, shapes: dict[str, tuple[int, ...]]
) -> None:
    segments = Segments.cut(shapes, sw.TopK(count=count), whole=6)
    place = Place(torch.arange(segments.room), segments, key=1)
    data = codec.encode(torch.ones(segments.room + segments.whole_size), place)
    assert (data.dtype, data.numel()) == (torch.uint8, codec.nbytes(segments))
    assert codec.decode(data, place, torch.float32).numel() == segments.room + segments.whole_size


def test_a_sparse_scheme_sends_less_than_a_dense_one() -> None:
    """What it is all for: 1 % of a matrix is 79 times less, and 303 times with two-bit values."""
    shapes = {"w": (1000, 1000)}
    dense = sw.explain("Scheme(Dense(), collective=AllGather())", shapes, 4).sent_bytes
    sparse = sw.explain("TopK(0.01)", shapes, 4).sent_bytes
    assert dense / sparse == pytest.approx(32 / 0.4056, rel=0.01)
    int32 = sw.explain("Scheme(TopK(0.01), indices=Int32())", shapes, 4).sent_bytes
    assert dense / int32 == pytest.approx(50, rel=0.01)
    two_bit = sw.explain("Scheme(TopK(0.01), values=TwoBit())", shapes, 4).sent_bytes
    assert dense / two_bit == pytest.approx(303, rel=0.01)
    blind = sw.explain("Scheme(RandomK(0.01), collective=AllGather())", shapes, 4).sent_bytes
    assert int32 / blind == pytest.approx(2, rel=0.01)  # no index travels
