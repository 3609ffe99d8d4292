"""What a scheme will send, what a run has sent, and both as text."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import sparsewire as sw
from sparsewire.adapters.updates import Updates
from sparsewire.counters import STAGES, Counters
from sparsewire.exchange import Exchange
from sparsewire.message import CHECKSUM_BYTES, HEADER_BYTES, STATUS_BYTES
from sparsewire.report import Report, dense_traffic, human_bytes
from sparsewire.segments import ParamSlice
from sparsewire.session import Session, Topology
from sparsewire.state import StateStore

from .laws.cases import CPU, Crew, noise

SHAPES = {"w": (1000, 1000), "b": (1000,)}


def test_explanation_of_top_k() -> None:
    found = sw.explain("Scheme(TopK(0.01), values=BFloat16())", SHAPES, 4)
    assert found.scheme == "Scheme(TopK(0.01), values=BFloat16())"
    assert (found.workers, found.parameters) == (4, 1_001_000)
    assert (found.selected, found.sent_densely) == (10_000, 1_000)
    assert (found.index_bytes, found.value_bytes) == (10_706, 22_000)
    assert (found.padding_bytes, found.check_bytes) == (6, CHECKSUM_BYTES + STATUS_BYTES)
    assert found.sent_bytes == 3 * (HEADER_BYTES + 32_720 + STATUS_BYTES)
    assert found.dense_float32_bytes == 2 * 4 * 1_001_000 * 3 // 4
    assert found.dense_bfloat16_bytes == 2 * 2 * 1_001_000 * 3 // 4


@pytest.mark.parametrize(
    ("text", "collective", "why"),
    [
        ("TopK(0.01)", "AllGather()", "picks different coordinates on every rank"),
        ("RandomK(0.01)", "AllReduce()", "the same coordinates with RandomK"),
        ("TopBlock(0.01)", "AllReduce()", "the same coordinates with TopBlock"),
        ("LeaderTopK(0.01)", "AllReduce()", "the same coordinates with LeaderTopK"),
        ("UnionTopK(0.01)", "AllReduce()", "the same coordinates with UnionTopK"),
        ("BlockRandomK(0.01)", "AllGather()", "draws its own coordinates with BlockRandomK"),
        ("Scheme(RandomK(0.01), collective=AllGather())", "AllGather()", "as asked; "),
        (
            "Scheme(RandomK(0.01), values=TwoBit())",
            "AllGather()",
            "TwoBit values cannot be summed in transit",
        ),
        ("Dense()", "AllReduce()", "the same coordinates with Dense"),
        ("TopK(1.0)", "AllGather()", "everything is sent; with Dense() the values would be summed"),
        (
            "Scheme(TopK(0.01), dense_below=2000000)",
            "AllGather()",
            "TopK has nothing left to select",
        ),
    ],
)
def test_explanation_says_why(text: str, collective: str, why: str) -> None:
    found = sw.explain(text, SHAPES, 2)
    assert found.collective == collective
    assert why in found.why
    assert f"  collective   {collective}: {found.why}" in str(found)


def test_more_bytes_than_dense_are_called_more() -> None:
    text = str(sw.explain("TopK(1.0)", SHAPES, 8))
    assert "in float32 (4.0x more)" in text


@pytest.mark.parametrize(
    ("text", "workers", "better"),
    [
        ("TopK(0.01)", 8, "Sharded()"),
        ("TopK(0.01)", 2, ""),
        ("Scheme(TopK(0.01), collective=Sharded())", 8, ""),
        ("Scheme(TopK(0.01), collective=Sharded())", 2, "AllGather()"),
        ("Scheme(RandomK(0.01), collective=AllGather())", 8, "AllReduce()"),
        ("Scheme(RandomK(0.01), collective=Sharded())", 8, "AllReduce()"),
        ("RandomK(0.01)", 8, ""),
        ("TopBlock(0.01)", 8, ""),
        ("LeaderTopK(0.01)", 8, ""),
        ("UnionTopK(0.01)", 8, ""),
        ("Scheme(LeaderTopK(0.01), collective=AllGather())", 8, "AllReduce()"),
        ("Dense()", 8, ""),
    ],
)
def test_explanation_names_what_sends_less(text: str, workers: int, better: str) -> None:
    found = sw.explain(text, {"w": (1000, 1000)}, workers)
    assert found.advice.startswith(f"collective={better} would send" if better else "")
    assert bool(found.advice) is bool(better)
    assert ("  instead      " in str(found)) is bool(better)


def test_explanation_of_owners_shows_both_ways() -> None:
    found = sw.explain("Scheme(TopK(0.01), collective=Sharded())", {"w": (1000, 1000)}, 4)
    assert found.sent_bytes == 3 * (
        HEADER_BYTES + STATUS_BYTES + found.push_bytes + found.pull_bytes
    )
    assert "to each owner" in str(found)
    assert found.memory_bytes == 2 * 4 * (1_000_000 + 250_000)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("TopK(0.01)", ""),
        ("Warmup(TopK(0.01), steps=70)", "dense for 70 steps; the sizes above apply afterwards"),
        ("Warmup(TopK(0.01), steps=1)", "dense for 1 step; the sizes above apply afterwards"),
        ("Warmup(TopK(0.01), steps=70, ease=True)", "eased in over 70 steps"),
    ],
)
def test_explanation_of_a_warm_up(text: str, words: str) -> None:
    found = sw.explain(text, SHAPES, 2)
    assert words in found.warmup
    assert ("warm-up" in str(found)) is bool(words)
    assert found.sent_bytes == sw.explain("TopK(0.01)", SHAPES, 2).sent_bytes


def test_explanation_as_text() -> None:
    text = str(sw.explain(sw.Scheme(sw.TopK(0.01)), SHAPES, 4))
    assert text.splitlines()[0] == "Scheme(TopK(0.01))"
    assert "10,000 selected + 1,000 sent densely of 1,001,000 values (1.10 %)" in text
    assert "54.8 kB = header 64 B + indices 10.7 kB + values 44.0 kB" in text
    assert "each of 4 workers" in text
    assert "6.0 MB in float32 (36.5x less), 3.0 MB in bfloat16 (18.3x less)" in text


@pytest.mark.parametrize("shapes", [{}, {"x": (0, 3)}, SHAPES])
def test_explanation_of_nothing_and_of_one_worker(shapes: dict[str, tuple[int, ...]]) -> None:
    found = sw.explain("TopK(0.01)", shapes, 1)
    assert found.sent_bytes == 0
    assert "nothing is sent" in str(found)
    assert "1 workers" not in str(found)


def test_explanation_is_json() -> None:
    found = sw.explain("TopK(0.01)", SHAPES, 4)
    again = json.loads(json.dumps(found.to_dict()))
    assert again == found.to_dict()
    assert again["sent_bytes"] == found.sent_bytes


@pytest.mark.parametrize("memory", ["ErrorFeedback()", "MomentumCorrection()", "NoMemory()"])
def test_explained_memory_is_what_a_store_takes(memory: str) -> None:
    scheme = sw.parse(f"Scheme(TopK(0.01), memory={memory})").at(0)
    fields = Exchange(scheme, scheme.partition(SHAPES), 2).fields(0)
    state = StateStore(scheme.fields, SHAPES).open(0, fields, torch.float32, CPU)
    tensors = [*state.before.values(), *state.after.values()]
    values = sum(tensor.numel() - 1 for tensor in tensors)
    assert sw.explain(scheme, SHAPES, 2).memory_bytes == 4 * values


@pytest.mark.parametrize(
    ("values", "world_size", "width", "expected"),
    [(100, 1, 4, 0), (100, 2, 4, 400), (100, 4, 4, 600), (100, 4, 2, 300), (1, 3, 4, 6)],
)
def test_dense_traffic(values: int, world_size: int, width: int, expected: int) -> None:
    assert dense_traffic(values, world_size, width) == expected


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1234, "1.2 kB"),
        (999_900, "999.9 kB"),
        (1_000_000, "1.0 MB"),
        (1_234_567, "1.2 MB"),
        (5.6e9, "5.6 GB"),
        (5.6e13, "56000.0 GB"),
    ],
)
def test_human_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(("count", "text"), [(999.7, "1.0 kB"), (999_960, "1.0 MB")])
def test_human_bytes_just_below_a_unit(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_report_of_a_run() -> None:
    scheme = sw.Scheme(sw.TopK(0.1), dense_below=64)
    crew = Crew(scheme, 4)
    for step in range(3):
        crew.exchange(noise(4, crew.size, step))
    report = crew.sessions[0].report(layers=True)
    assert (report.scheme, report.world_size, report.steps) == (repr(scheme), 4, 3)
    assert report.bytes_sent == report.bytes_received == 3 * crew.next_exchange.traffic
    assert report.dense_bytes == dense_traffic(3 * crew.size, 4, 4)
    assert report.reduction == report.dense_bytes / report.bytes_sent
    assert report.memory_norm == pytest.approx(float(crew.remembered(0).norm()))
    names = [name for name, _, _ in report.layers]
    assert sorted(names) == sorted(crew.shapes)
    total = math.sqrt(sum(memory**2 for _, memory, _ in report.layers))
    assert total == pytest.approx(report.memory_norm)


def make_report(**changes: object) -> Report:
    counters = Counters(steps=2, bytes_sent=4000, bytes_received=4000, values=10_000)
    for name, value in changes.items():
        setattr(counters, name, value)
    params = (ParamSlice("w", (1,), 0), ParamSlice("b", (1,), 1))
    counters.accumulated[params] = torch.tensor([9.0, 16.0])
    return Report.of("Scheme(TopK(0.01))", counters, 2, {"w": 4.0}, layers=bool(changes))


def test_totals_are_flat_numbers() -> None:
    stats = make_report().to_dict()
    assert list(stats) == [
        "steps",
        "skipped",
        "bytes_sent",
        "bytes_received",
        "dense_bytes",
        "selected",
        "aimed_at",
        "reduction",
        *(f"seconds_{stage}" for stage in STAGES),
        "memory_norm",
        "gradient_norm",
    ]
    assert all(isinstance(value, (int, float)) for value in stats.values())
    assert (stats["memory_norm"], stats["gradient_norm"]) == (2.0, 5.0)
    assert stats["reduction"] == 10.0


def test_report_as_text() -> None:
    text = str(make_report())
    assert text.splitlines()[0] == "Scheme(TopK(0.01)) on 2 ranks, 2 steps"
    assert "sent per step      2.0 kB, received 2.0 kB" in text
    assert "10.0x less than float32, 5.0x less than bfloat16" in text
    assert "memory / gradient  2 / 5 (norms)" in text
    assert "parameter" not in text


def test_report_by_layer_and_with_skipped_steps() -> None:
    lines = str(make_report(skipped=2)).splitlines()
    assert lines[0].endswith("2 steps, 2 skipped")
    assert "sent per step      1.0 kB" in lines[1]
    assert [line.split() for line in lines[-3:]] == [
        ["parameter", "memory", "gradient"],
        ["w", "2", "3"],
        ["b", "0", "4"],
    ]


def test_report_of_one_rank_and_one_step() -> None:
    report = Report.of("TopK(0.01)", Counters(steps=1), 1, {}, layers=False)
    assert str(report).splitlines()[0] == "TopK(0.01) on 1 rank, 1 step"


def test_report_before_the_first_step() -> None:
    report = Report.of("Scheme(TopK(0.01))", Counters(), 2, {}, layers=True)
    assert report.reduction == 1.0
    assert "0 steps" in str(report)
    assert report.to_dict()["memory_norm"] == 0


def test_report_with_norms_that_overflowed() -> None:
    counters = Counters(accumulated={(ParamSlice("w", (1,), 0),): torch.tensor([math.inf])})
    report = Report.of("Scheme(TopK(0.01))", counters, 2, {}, layers=True)
    assert report.gradient_norm == math.inf
    assert "inf" in str(report)


def test_threshold_stays_near_its_target_and_the_report_says_how_near() -> None:
    """Layers of all sizes, heavy tails, memory carried on: the total stays within a fifth."""
    shapes = {"large": (300, 1000), "middle": (100, 300), "small": (60, 50), "b": (64,)}
    crew = Crew(sw.Threshold(0.01, sample=30_000), 1, shapes)
    counters, last, off = crew.all_counters[0], 0, []
    for step in range(20):
        crew.exchange(noise(1, crew.size, step))
        off.append(int(counters.selected) - last - 3330)
        last = int(counters.selected)
    assert counters.aimed_at == 20 * 3330
    assert max(map(abs, off)) < 0.2 * 3330
    assert any(off)
    assert crew.sessions[0].report().selected == last


def test_other_selectors_choose_what_they_are_to() -> None:
    crew = Crew(sw.TopK(0.01), 2, {"w": (100, 300), "b": (64,)})
    crew.exchange(noise(2, crew.size, 0))
    assert crew.all_counters[0].selected == crew.all_counters[0].aimed_at == 300


@pytest.mark.parametrize("delay", [0, 1])
def test_explained_memory_of_updates_is_what_they_take(delay: int) -> None:
    scheme = sw.parse("TopK(0.01)").at(0)
    net = nn.Sequential(nn.Linear(100, 80), nn.Linear(80, 7))
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
    session = Session(scheme, shapes, Topology(0, 2))
    updates = Updates(session, dict(net.named_parameters()), is_delayed=bool(delay))
    found = sw.explain(scheme, shapes, 2, communicate="updates", delay=delay)
    held = [updates.weights.shared, updates.mean]
    held += [updates.weights._start] if updates.weights._start is not None else []
    assert found.weights_bytes == sum(tensor.nbytes for tensor in held)
    without = sw.explain(scheme, shapes, 2).memory_bytes
    assert found.memory_bytes == found.weights_bytes + without
    assert "of it for shared weights and update" in str(found)


def test_local_steps_are_said() -> None:
    found = sw.explain("TopK(0.01)", SHAPES, 4, communicate="updates", every=15)
    assert "received per round of 15 local steps by each of 4 workers" in str(found)
    with pytest.raises(sw.errors.SchemeError, match="for communicate='updates'"):
        sw.explain("TopK(0.01)", SHAPES, 4, every=15)
    with pytest.raises(sw.errors.SchemeError, match="'gradients' or 'updates', not 'weights'"):
        sw.explain("TopK(0.01)", SHAPES, 4, communicate="weights")  # type: ignore[arg-type]


def test_a_warmup_tells_the_bytes_of_its_first_steps() -> None:
    shapes = {"w": (1000, 100)}
    told = str(sw.explain("Warmup(TopK(0.01), steps=50, ratio=0.1)", shapes, workers=4))
    first = sw.explain("TopK(0.1)", shapes, workers=4).sent_bytes
    assert f"a ratio of 0.1 for 50 steps, with {human_bytes(first)} sent in each" in told
