"""`sparsewire bench step` in real processes: over loopback, on a lab, and when things go wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparsewire.tools.bench.contenders import PEERS, SHORT
from sparsewire.tools.bench.step.stopwatch import PARTS
from sparsewire.tools.cli import main
from sparsewire.tools.lab import obstacle

from ...patience import patience
from .conftest import TINY, bench

LOOPBACK = ["--loopback", "--hosts", "2"]


def sentence(ended: subprocess.CompletedProcess[str]) -> str:
    """The one line a failed command ends with, checked to be no traceback."""
    assert "Traceback" not in ended.stderr
    return ended.stderr.splitlines()[-1]


def by_name(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in run["contenders"]}


def test_all_peers_over_loopback(folder: Path) -> None:
    words = ["--model", "tiny:model", "--batch-size", "8", "--rounds", "2", "--steps", "2"]
    words += ["--peers", *SHORT, "--schemes", "TopK(0.1)", "--out", "out"]
    ended = bench(folder, *LOOPBACK, *words)
    assert ended.returncode == 0, ended.stderr
    for name in ("compute alone", *PEERS, "TopK(0.1)"):
        assert name in ended.stdout
        assert ended.stderr.count(f"  {name}  ") == 2, "a line for each turn"
    assert "On 2 hosts over loopback" in ended.stdout
    results = json.loads((folder / "out" / "results.json").read_text())
    assert results["model"] == {
        "name": "tiny:model",
        "parameters": 2762,
        "tensors": 4,
        "examples": 8,
    }
    assert results["schema"] == 3
    assert results["arguments"]["schemes"] == ["TopK(0.1)"]
    (run,) = results["runs"]
    assert run["hosts"] == 2
    found = by_name(run)
    assert list(found) == ["compute alone", *PEERS, "TopK(0.1)"]
    for one in found.values():
        if one["failed"]:
            assert "cannot add" in one["failed"]
            continue
        assert [sample["round"] for sample in one["samples"]] == [0, 0, 1, 1]
        for sample in one["samples"]:
            assert sum(sample["parts"].values()) == pytest.approx(sample["seconds"], abs=1e-5)
            assert sum(sample["ranks"]) / 2 == pytest.approx(sample["seconds"], abs=1e-5)
        assert list(one["summary"]["parts"]) == list(PARTS)
    assert found["dense DDP"]["summary"]["payload_per_step"] == 4 * 2762
    assert found["TopK(0.1)"]["summary"]["payload_per_step"] < 2 * 2762
    assert found["compute alone"]["summary"]["payload_per_step"] == 0
    assert (folder / "out" / "step.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "out" / "step.svg").exists()
    assert "tiny:model" in (folder / "out" / "report.html").read_text()


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_on_a_lab(folder: Path) -> None:
    words = ["--model", "tiny:model", "--rounds", "1", "--steps", "2", "--hosts", "2", "--quiet"]
    ended = bench(
        folder,
        *words,
        "--rates",
        "20mbit",
        "none",
        "--peers",
        "dense",
        "--schemes",
        "TopK(0.1)",
        "--json",
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    slow, fast = json.loads(ended.stdout)["runs"]
    assert (slow["network"], slow["rate"], fast["rate"]) == ("lab", 20_000_000, None)
    assert [link["asked"] for link in slow["links"]] == [20_000_000] * 2
    assert len(fast["links"]) == 2
    for run in (slow, fast):
        dense, sparse = (by_name(run)[name]["summary"] for name in ("dense DDP", "TopK(0.1)"))
        assert dense["wire_per_step"] > dense["payload_per_step"] == 4 * 2762
        assert sparse["wire_per_step"] > sparse["payload_per_step"]


FRAGILE = f"""{TINY}
import os, time

def fragile(rank):
    net, loss = model(rank)
    calls = 0
    def counting(net):
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 7:  # a rehearsal, four steps of compute alone, and one more
            if not os.path.exists("raised"):
                open("raised", "w").close()
                raise RuntimeError("a network card fell out")
            if not os.path.exists("hung"):
                open("hung", "w").close()
                time.sleep(1000)
        return loss(net)
    return net, counting
"""


def test_failing_contenders_are_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    """Of two peers one raises and one hangs, on one rank each; the others are measured."""
    (tmp_path / "fragile.py").write_text(FRAGILE)
    timeout = f"{patience(12):g}"
    words = ["--model", "fragile:fragile", "--rounds", "1", "--steps", "2", "--timeout", timeout]
    peers = ["--peers", "dense", "fp16", "powersgd-1", "--schemes", "TopK(0.1)"]
    ended = bench(tmp_path, *LOOPBACK, *words, *peers, "--json")
    assert ended.returncode == 0, ended.stderr
    found = by_name(json.loads(ended.stdout)["runs"][0])
    assert "a network card fell out" in found["dense DDP"]["failed"]
    assert "dense DDP failed: " in ended.stderr
    hung = [one["name"] for one in found.values() if f"for {timeout} s" in (one["failed"] or "")]
    assert len(hung) == 1
    fine = [one["name"] for one in found.values() if one["failed"] is None]
    assert len(fine) == 3
    assert "compute alone" in fine


BROKEN = f"""{TINY}
def raises(rank):
    raise KeyError("no such dataset")

def returns(rank):
    return nn.Linear(2, 2)

def vector(rank):
    net, _ = model(rank)
    return net, lambda net: net(torch.ones(3, 32))

def fails(rank):
    net, _ = model(rank)
    return net, lambda net: net(torch.ones(3, 31)).sum()

def unused(rank):
    net, loss = model(rank)
    net.spare = nn.Parameter(torch.ones(3))
    return net, loss

def different(rank):
    torch.manual_seed(rank)
    return model(rank)

number = 5
"""


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises", "failed with KeyError: 'no such dataset'"),  # on whichever rank is first
        ("different", "broken:different builds another model on rank 1 than on rank 0"),
    ],
)
def test_functions_of_users_that_fail(tmp_path: Path, function: str, reason: str) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    ended = bench(tmp_path, *LOOPBACK, "--model", f"broken:{function}")
    assert ended.returncode == 1
    assert reason in sentence(ended)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("returns", "must return a model and a function"),
        ("vector", "must be a tensor with one number"),
        ("fails", "the loss of broken:fails failed with RuntimeError"),
        ("unused", "spare in the model of broken:unused gets no gradient"),
    ],
)
def test_models_of_users_that_cannot_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, reason: str
) -> None:
    from sparsewire.tools.tasks import workloads

    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    name = f"broken:{function}"
    with pytest.raises(workloads.WorkloadError, match=reason):
        workloads.rehearse(workloads.build(name, None, 0), name)


WRONG_WORDS = [
    ("bench stepp", "did you mean step?"),
    ("bench frobnicate", "there are step"),
    ("bench step --schemes TopKK(0.01)", "did you mean TopK?"),
    ("bench step --schemes TopK(2)", "above 0 and at most 1"),
    ("bench step --peers dens", "did you mean dense?"),
    ("bench step --schemes --peers", "nothing to measure"),
    ("bench step --model resnet19", "there are mnist, resnet18, transformer"),
    ("bench step --model no_such_module:build", "No module named 'no_such_module'"),
    ("bench step --model json:version", "has no attribute 'version'"),
    ("bench step --model json:__name__", "must be a function of the rank, not str"),
    ("bench step --rates 1gb", "--rates: '1gb' is no rate"),
    ("bench step --rates", "--rates needs at least one value"),
    ("bench step --hosts 1", "--hosts must be at least 2"),
    ("bench step --hosts 65", "--hosts 65 is too many"),
    ("bench step --rounds 0", "--rounds must be at least 1"),
    ("bench step --steps 1", "--steps must be at least 2"),
    ("bench step --batch-size 0", "--batch-size must be at least 1"),
    ("bench step --timeout 0", "--timeout must be"),
]


@pytest.mark.parametrize(("words", "reason"), WRONG_WORDS, ids=[case[0] for case in WRONG_WORDS])
def test_wrong_words(capsys: pytest.CaptureFixture[str], words: str, reason: str) -> None:
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("sparsewire: ")
    assert shown.err.count("\n") == 1
    assert reason in shown.err


def test_without_root(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sparsewire.tools.cli.site.obstacle", lambda: "a lab needs root")
    assert main(["bench", "step", "--model", "resnet18"]) == 1
    assert "a lab needs root; or add --loopback" in capsys.readouterr().err
    assert main(["train", "mnist", "--rate", "1gbit"]) == 1
    assert "a lab needs root; or leave --rate out" in capsys.readouterr().err
    assert main(["compare", "mnist", "--rate", "1gb"]) == 2
    assert "--rate: '1gb' is no rate" in capsys.readouterr().err
    assert not (folder / "runs" / "bench-step").exists()


def test_help_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["bench"], ["bench", "--help"], ["bench", "step", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert not ended.value.code
        shown = capsys.readouterr().out
        assert "  sparsewire bench step --model resnet18" in shown
    with pytest.raises(SystemExit):
        main([])
    assert "  bench    Measure" in capsys.readouterr().out
