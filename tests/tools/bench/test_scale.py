"""`sparsewire bench scale`: loads, the model, what follows, and a real measurement."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import asdict, astuple, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from sparsewire.tools.bench import kinds
from sparsewire.tools.bench.report import chart, render
from sparsewire.tools.bench.results import Results, ResultsError, dumps
from sparsewire.tools.bench.scale import columns, report
from sparsewire.tools.bench.scale.model import Load, Loads, Measured, Model, fit, share
from sparsewire.tools.bench.scale.report import headline, remarks
from sparsewire.tools.bench.scale.view import Scale
from sparsewire.tools.cli import main
from tests.cluster import Cluster

from .conftest import bench, contender, results, run

BUCKETS = [{"out": [10, 1000], "out.bias": [10]}, {"in": [1000, 4000], "in.bias": [1000]}]
DENSE_BUCKETS = [{"values": [10_010]}, {"values": [4_001_000]}]
SHARED = "BlockRandomK(0.01, shared=True)"
NAMES = ("dense DDP", "TopK(0.01)", "Scheme(TopK(0.01), values=TwoBit())", SHARED)
TRUE = Model(step=0.01, hop=2e-4, byte=8e-9, move=1e-9, look=3e-9, addition=2e-8)


def loads(name: str) -> Loads:
    return Loads(name, DENSE_BUCKETS if name == "dense DDP" else BUCKETS)


def points(model: Model, noise: float = 0.0) -> list[Measured]:
    """What would be measured if `model` were true."""
    found = []
    generator = np.random.default_rng(0)
    for hosts in (2, 4, 6, 8):
        for name in NAMES:
            load, shared = loads(name).on(hosts), share(hosts, 2)
            compute = 0.1 * shared
            step = compute + model.beyond(load, shared) * (1 + noise * generator.normal())
            found.append(Measured(load, shared, compute, step))
    return found


def test_fitting_recovers_what_is_true() -> None:
    found = fit(points(TRUE))
    for name, value in asdict(TRUE).items():
        assert asdict(found)[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("absent", list(asdict(TRUE)))
def test_a_term_that_is_not_there_is_zero(absent: str) -> None:
    found = fit(points(Model(**{**asdict(TRUE), absent: 0.0})))
    assert asdict(found)[absent] == pytest.approx(0, abs=1e-6 * max(asdict(TRUE).values()))


def test_coefficients_are_never_negative() -> None:
    for noise in (0.5, 1.0, 2.0):
        assert all(value >= 0 for value in astuple(fit(points(TRUE, noise))))
    quick = [Measured(Load(1, 1000, 10, 10), 1.0, 1.0, 0.9)] * 3
    assert fit(quick) == Model(0, 0, 0, 0, 0, 0), "faster than compute alone"


def test_noise_stays_small() -> None:
    model = fit(points(TRUE, noise=0.05))
    for hosts in (2, 8):
        load = loads("TopK(0.01)").on(hosts)
        assert model.beyond(load) == pytest.approx(TRUE.beyond(load), rel=0.5)


def test_loads_of_an_all_gather_grow_and_of_an_all_reduce_stay() -> None:
    gather, reduce, dense = loads("TopK(0.01)"), loads(SHARED), loads("dense DDP")
    assert gather.on(9).received == pytest.approx(8 * gather.on(2).received)
    assert reduce.on(9).received < 2.1 * reduce.on(2).received
    assert dense.on(2).received == 4 * 4_011_010
    assert gather.on(9).added == 9 * gather.on(1).added
    assert reduce.on(9).added == reduce.on(2).added
    assert gather.on(9).hops == 2 + 2  # header, verdict, and two buckets, all small
    assert 2 + 99 < gather.on(100).hops <= 2 + 2 * 99  # too many to reach at once
    assert reduce.on(9).hops == 2 + 4
    block, leader = loads("TopBlock(0.01)"), loads("LeaderTopK(0.01)")
    union = loads("UnionTopK(0.01)")
    assert block.on(9).hops == 2 + 4 + 4  # norms are added up first
    assert block.on(9).added > reduce.on(9).added
    assert leader.on(9).hops == 2 + 4 + 2 * 4  # a tree of nine
    assert union.on(9).hops == 2 + 4 + 2  # one message from all to all, a bucket
    assert dense.on(9).hops == 2 * 8 * 2


def _count_bytes(name: str) -> tuple[list[int], list[dict[str, tuple[int, ...]]]]:
    """Bytes that each of a few steps received, and the buckets they came in."""
    from time import perf_counter

    import torch
    import torch.distributed as dist
    from torch import nn

    from sparsewire.tools.bench.contenders import Entry

    torch.manual_seed(0)
    # More than DDP's first bucket holds, so that there are several.
    net = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 100), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    entry = Entry(name, net, optimizer, perf_counter, 30)
    counts = []
    for step in range(6):
        if step == 3:
            entry.forget_buckets()
        before = entry.sent(2)
        entry.model(torch.randn(4, 64)).square().sum().backward()
        counts.append(entry.sent(2) - before)
    buckets = entry.buckets()
    dist.barrier()
    entry.leave()
    return counts[3:], buckets


@pytest.mark.xdist_group("ranks 0")  # where two ranks are kept running
@pytest.mark.parametrize(
    "name",
    [
        *NAMES,
        "Threshold(0.01)",
        "RandomK(0.01)",
        "Scheme(TopK(0.01), scope='global')",
        "Scheme(TopK(0.01), collective=Sharded())",
    ],
)
def test_bytes_are_what_a_meter_counts(two: Cluster, name: str) -> None:
    for counts, buckets in two.run(_count_bytes, name):
        assert len(buckets) == (1 if "global" in name else 2)
        assert counts == [Loads(name, buckets).on(2).received] * 3


@pytest.fixture
def scale() -> Scale:
    """A measurement of `NAMES` that obeys `TRUE`, but for one point."""
    return obeying(NAMES)


def obeying(names: tuple[str, ...]) -> Scale:
    """A measurement that obeys `TRUE`, but for one point."""
    runs = []
    for hosts in (2, 4, 6, 8):
        compute = 0.1 * share(hosts, 2)
        steps = [compute + TRUE.beyond(loads(name).on(hosts), share(hosts, 2)) for name in names]
        if hosts == 4:
            steps[1] *= 1.05
        network = run(
            contender("compute alone", compute),
            *(contender(name, step) for name, step in zip(names, steps, strict=True)),
            contender("bf16 hook", failed="the backend <gloo> cannot add bfloat16"),
            hosts=hosts,
        )
        runs.append(network)
    buckets = {name: DENSE_BUCKETS if name == "dense DDP" else BUCKETS for name in names}
    facts = {"alone": 0.08, "most": 1024, "buckets": buckets}
    return Scale(replace(results(*runs, name="mnist"), kind="scale", facts=facts))


def test_what_follows(scale: Scale) -> None:
    assert scale.names == list(NAMES)
    assert len(scale.checked) == 16
    assert (scale.worst.name, scale.worst.hosts) == ("TopK(0.01)", 4)
    assert 0 < scale.mean_error < 0.02
    assert scale.doublings == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    crossing = scale.crossover("TopK(0.01)")
    assert crossing is not None
    assert scale.modelled("TopK(0.01)", crossing) >= scale.modelled("dense DDP", crossing)
    assert scale.modelled("TopK(0.01)", crossing - 1) < scale.modelled("dense DDP", crossing - 1)
    many = scale.crossover_of_bytes("TopK(0.01)")
    assert many is not None
    assert scale.received("TopK(0.01)", many) >= scale.received("dense DDP", many)
    assert scale.crossover(SHARED) is None
    assert headline(scale).endswith(
        f"; in the model {SHARED} is faster than dense DDP up to 1024 hosts."
    )
    said = " ".join(remarks(scale))
    assert f"in the model it is no faster than dense DDP from {crossing} hosts on" in said
    assert "bf16 hook failed on 2 hosts" in said


@pytest.mark.parametrize(
    ("seconds", "prospect"),
    [
        (lambda hosts: 50.0, "is faster than dense DDP up to 1024 hosts"),
        (lambda hosts: 200.0, "is no faster than dense DDP up to 1024 hosts"),
        (lambda hosts: float(hosts), "is no faster than dense DDP from 100 hosts on"),
        (lambda hosts: 3000 / hosts, "is faster than dense DDP from 31 hosts on"),
        (lambda hosts: abs(300 - hosts) / 4 + 50, "is no faster than dense DDP from 500 hosts on"),
    ],
)
def test_what_a_model_says_of_more_hosts_holds_for_all_of_them(
    scale: Scale,
    monkeypatch: pytest.MonkeyPatch,
    seconds: Callable[[int], float],
    prospect: str,
) -> None:
    """Whatever the lines do: they may cross twice, or a scheme may win with many hosts alone."""

    def modelled(self: Scale, name: str, hosts: int) -> float:
        return 100.0 if name == "dense DDP" else seconds(hosts)

    monkeypatch.setattr(Scale, "modelled", modelled)
    assert headline(scale).endswith(f"; in the model {SHARED} {prospect}.")


def test_json_round_trip(scale: Scale) -> None:
    content = json.loads(dumps(kinds.as_json(scale.results)))
    again = Scale(Results.from_dict(content))  # times to the microsecond, from here on the same
    assert Results.from_dict(json.loads(dumps(kinds.as_json(again.results)))) == again.results
    assert again.crossover("TopK(0.01)") == scale.crossover("TopK(0.01)")
    assert content["kind"] == "scale"
    assert len(content["fitted"]["points"]) == 16
    assert {one["hosts"] for one in content["modelled"]} == set(scale.doublings)
    with pytest.raises(ResultsError, match="no results: KeyError\\('target'\\)"):
        Results.from_dict({**content, "kind": "train"})
    with pytest.raises(ResultsError, match="no results"):
        Results.from_dict({"schema": 1, "kind": "scale"})


def test_table_picture_and_page(scale: Scale, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    for table in columns.tables(scale):
        console.print(table)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("Modelled, not measured", "1024 hosts", "compute alone", "error", "~"):
        assert text in shown
    report.save_picture(scale.results, tmp_path / "scale.png", tmp_path / "scale.svg")
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")
    ElementTree.parse(tmp_path / "scale.svg")
    text = render(report.page(scale.results))
    assert render(report.page(scale.results)) == text, "the same from the same"
    assert "Modelled, not measured" in text
    assert "stroke-dasharray" in text
    assert "<gloo>" not in text


def test_no_words_of_the_picture_lie_on_each_other() -> None:
    owners = "Scheme(TopK(0.01), values=TwoBit(), memory=NoMemory(), collective=Sharded())"
    figure = chart.draw(report.chart(obeying(("dense DDP", "TopK(0.01)", owners, SHARED))))
    figure.draw_without_rendering()
    words = [*figure.texts, *(text for legend in figure.legends for text in legend.texts)]
    boxes = [text.get_window_extent() for text in words]
    assert len(boxes) == 5 + 3, "four contenders, compute alone, and three kinds of lines"
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    panels = [axes.get_tightbbox() for axes in figure.axes]
    assert not any(box.overlaps(panel) for box in boxes for panel in panels)


@pytest.mark.slow  # starts processes three times: alone, on two hosts and on three
def test_a_measurement(folder: Path) -> None:
    words = ["--loopback", "--hosts", "3", "2", "--model", "tiny:model", "--rounds", "1"]
    more = ["--steps", "2", "--schemes", "TopK(0.1)", "--most", "100", "--out", "out"]
    ended = bench(folder, *words, *more, command="scale")
    assert ended.returncode == 0, ended.stderr
    assert "2 hosts over loopback" in ended.stderr
    assert "Modelled, not measured" in ended.stdout
    content = json.loads((folder / "out" / "results.json").read_text())
    found = Scale(Results.from_dict(content))
    assert [run.hosts for run in found.runs] == [2, 3]
    assert found.names == ["dense DDP", "TopK(0.1)"]
    for name in found.names:
        for hosts, one in found.measured(name).items():
            # Half a byte may be missing where a ring's shares are not even.
            assert one.payload == pytest.approx(found.received(name, hosts), abs=0.5)
    assert all(value >= 0 for value in content["fitted"]["seconds_per"].values())
    for name in ("scale.png", "scale.svg", "report.html"):
        assert (folder / "out" / name).exists()


WRONG_WORDS = [
    ("--hosts 4", "--hosts needs two numbers or more"),
    ("--hosts 1 2", "--hosts must be at least 2"),
    ("--hosts 2 65", "--hosts 65 is too many"),
    ("--most 3", "--most must be at least 8"),
    ("--schemes", "--schemes needs at least one value"),
    ("--schemes TopK(2)", "above 0 and at most 1"),
    ("--rate 1gb", "--rate: '1gb' is no rate"),
    ("--rounds 0", "--rounds must be at least 1"),
    ("--steps 1", "--steps must be at least 2"),
    ("--model resnet19", "there are mnist, resnet18, transformer"),
]


@pytest.mark.parametrize(("words", "reason"), WRONG_WORDS, ids=[case[0] for case in WRONG_WORDS])
def test_wrong_words(capsys: pytest.CaptureFixture[str], words: str, reason: str) -> None:
    assert main(["bench", "scale", *words.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert reason in shown.err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["bench"], ["bench", "scale", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert not ended.value.code
        assert "  sparsewire bench scale --hosts 2 4 8" in capsys.readouterr().out
