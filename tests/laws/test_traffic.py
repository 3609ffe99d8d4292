"""Sent bytes = predicted bytes: in the counters, in the requests themselves, and in `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import sparsewire as sw
from sparsewire.codecs import Place, ValueCodec
from sparsewire.message import HEADER_BYTES, STATUS_BYTES, bytes_with_checksum
from sparsewire.requests import Request
from sparsewire.segments import Segments
from sparsewire.selectors import Coordination
from sparsewire.sums import reduce_traffic
from sparsewire.workspace import Workspace

from .cases import SAMPLE, SHAPES, Crew, examples, label, noise


class Recorder(sw.groups.SimulatedGroup):
    """Notes what rank 0 asks for."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.asked: list[Request] = []

    def carry(self, ranks: Sequence[int], requests: Sequence[Request]) -> list[Any]:
        self.asked.append(requests[0])
        return super().carry(ranks, requests)


@pytest.mark.parametrize("scheme", SAMPLE, ids=label)
def test_meter_exchange_and_explanation_agree(scheme: sw.Scheme) -> None:
    for world_size in (1, 2, 3):
        crew = Crew(scheme, world_size)
        crew.exchange(noise(world_size, crew.size, 0))
        predicted = crew.next_exchange.traffic
        assert sw.explain(scheme, SHAPES, world_size).sent_bytes == predicted
        for counters in crew.all_counters:
            assert counters.bytes_sent == counters.bytes_received == predicted
        assert (predicted == 0) == (world_size == 1)


@pytest.mark.parametrize("scheme", SAMPLE, ids=label)
@pytest.mark.parametrize("skips_unused", [False, True])
def test_requests_are_as_large_as_announced(scheme: sw.Scheme, skips_unused: bool) -> None:
    group = Recorder(3)
    crew = Crew(scheme, 3, skips_unused=skips_unused, group=group)
    exchange = crew.next_exchange
    crew.exchange(noise(3, crew.size, 0))
    header, *others, status = group.asked
    flags, others = others[:skips_unused], others[skips_unused:]
    said_ahead = 1 if scheme.selector.proposers != "none" else 2  # a sum takes two
    if scheme.selector.coordination is not Coordination.NEGOTIATED:
        said_ahead = 0
    negotiation, payloads = others[:said_ahead], others[said_ahead:]
    assert status.payload.numel() == STATUS_BYTES
    assert status.group == "status"
    assert header.payload.numel() == HEADER_BYTES
    nbytes = bytes_with_checksum(len(SHAPES))
    assert [flag.payload.numel() for flag in flags] == [nbytes] * skips_unused
    if negotiation:
        assert exchange.negotiation is not None
        assert sum(said.traffic(3) for said in negotiation) == exchange.negotiation.traffic
        if scheme.selector.proposers != "none":
            carried = "broadcast" if scheme.selector.proposers == "leader" else "all_gather"
            assert negotiation[0].op == carried
            assert negotiation[0].payload.numel() == exchange.negotiation.nbytes
    assert {payload.payload.dtype for payload in payloads} == {torch.uint8}
    if scheme.collective.adds:
        width, count = scheme.values.dtype.itemsize, exchange.layout.value_count
        assert width * count == exchange.layout.value_bytes
        added = reduce_traffic(count, width, 4, 3)
        assert sum(payload.traffic(3) for payload in payloads) == added
    elif scheme.collective.fields:
        nbytes = exchange.plan.message_bytes
        assert payloads[0].payload.shape == (3, nbytes["push"])
        assert payloads[1].payload.numel() == nbytes["pull"]
    else:
        assert payloads[0].payload.numel() == exchange.layout.nbytes
    assert sum(payload.traffic(3) for payload in payloads) == exchange.plan.traffic
    total = sum(request.traffic(3) for request in (header, *flags, *negotiation, *payloads, status))
    assert total == exchange.traffic


@pytest.mark.parametrize("codec", examples("values"), ids=label)
@pytest.mark.parametrize("count", [1, 7, 8, 100])
@pytest.mark.parametrize("shapes", [{}, {"b": (5,)}, {"x": (101, 3)}, {"x": (101, 3), "b": (5,)}])
def test_value_codecs_write_what_they_announce(
    codec: ValueCodec, count: int, shapes: dict[str, tuple[int, ...]]
) -> None:
    segments = Segments.partition(shapes, sw.TopK(count=count), dense_below=6)
    place = Place(torch.arange(segments.capacity), segments, 1, Workspace())
    data = codec.encode(torch.ones(segments.capacity + segments.dense_size), place)
    assert (data.dtype, data.numel()) == (torch.uint8, codec.nbytes(segments))
    assert (
        codec.decode(data, place, torch.float32).numel() == segments.capacity + segments.dense_size
    )


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
