"""The command line as a person types it: help, versions, lists, and every kind of mistake."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from sparsewire.tools.cli import main
from sparsewire.tools.cli.options import COMMANDS, BenchStep, BenchTrain, Lab, Train
from sparsewire.tools.cli.parse import parse
from sparsewire.tools.cli.site import cores

from .conftest import environment, run, sentence


@pytest.mark.parametrize(
    "words",
    [[], ["--help"], ["train", "--help"], ["compare", "--help"], ["lab", "--help"], ["--version"]],
)
def test_help_does_not_import_torch(words: list[str]) -> None:
    program = (
        "import sys\n"
        "from sparsewire.tools.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *words],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert "examples:" in ended.stdout or "--version" in words


def test_help_of_every_command_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("train", "compare", "list", "explain", "lab"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert not ended.value.code
        assert f"  sparsewire {command}" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_every_option_and_fits_the_terminal(
    name: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    shown = capsys.readouterr().out
    text, _, examples = shown.partition("examples:")
    for field in fields(COMMANDS[name]):
        if "option" in field.metadata:
            word = field.name.replace("_", "-")
            positional = field.metadata["option"].positional
            flag = word.upper() if positional else f"--{'no-' * (field.default is True)}{word}"
            assert re.search(rf"^  {flag}\b", text, re.MULTILINE), flag
    assert max(map(len, text.splitlines())) <= columns
    assert f"sparsewire {name}" in examples


def test_help_says_what_happens_without_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--workers N Local processes to start." in shown
    assert "Learning rate. (default: 0.2 for sgd, 0.02 for adagrad)" in shown
    assert "Widths of the hidden layers. (default: 256 256)" in shown
    assert "None" not in shown
    assert shown.index("--checkpoint-every") < shown.index("--workers") < shown.index("--json")


def test_values_have_the_types_of_their_fields() -> None:
    asked = parse(["train", "mnist", "--hidden", "8", "4", "--lr", "1e-2", "--metrics", "m.jsonl"])
    assert asked == Train(task="mnist", hidden=(8, 4), lr=0.01, metrics=Path("m.jsonl"))
    assert parse(["train", "mnist", "--hidden"]) == Train(task="mnist", hidden=())
    assert parse(["lab"]) == Lab()
    words = ["lab", "--rate", "1gbit", "--rate=0=1mbit", "--no-check", "--", "a", "--debug", "--"]
    assert parse(words) == Lab(
        rate=("1gbit", "0=1mbit"), check=False, command=("a", "--debug", "--")
    )
    assert parse(["bench", "step", "--rate", "none", "1gbit"]) == BenchStep(rates=("none", "1gbit"))
    assert parse(["bench", "train", "--optimizer", "adamw"]) == BenchTrain(optimizer="adamw")


def test_missing_extra() -> None:
    program = (
        "import sys\nsys.modules['rich'] = None\n"
        "from sparsewire.tools.cli import main\nsys.exit(main(['list']))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert "the command line needs rich, which is not installed: " in sentence(ended)
    assert sentence(ended).endswith("run pip install '.[cli]' in a clone of sparsewire")


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    import sparsewire as sw

    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert main(["list", "--json"]) == 0
    families = json.loads(capsys.readouterr().out)
    for family, parts in sw.scheme.FAMILIES.items():
        assert list(families[family]) == [part.__name__ for part in parts]
        assert all(families[family].values()), "every part has a summary"
        assert all(part.__name__ in shown for part in parts)


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    import sparsewire as sw

    words = ["explain", "TopK(0.01)", "--workers", "4"]
    assert main([*words, "--params", "1e6", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    expected = sw.explain(sw.parse("TopK(0.01)"), {"parameters": (1, 10**6)}, 4)
    assert told == json.loads(json.dumps(expected.to_dict()))
    assert main([*words, "--params", "1e6"]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert main([*words, "--communicate", "updates", "--every", "15"]) == 0
    assert "per round of 15 local steps by each of 4 workers" in capsys.readouterr().out
    assert main([*words, "--every", "15"]) == 2
    assert "--every is for --communicate updates" in capsys.readouterr().err
    assert main([*words, "--model", "mnist", "--hidden", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 784 * 8 + 8 + 8 * 10 + 10


OWN_MODEL = """
from torch import nn

def small(rank):
    net = nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 10))
    net[1].bias.requires_grad_(False)
    return net, lambda net: None
"""


@pytest.mark.timeout(60)
def test_explain_for_the_models_of_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_model.py").write_text(OWN_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert main(["explain", "TopK(0.1)", "--model", "own_model:small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 30 * 50 + 50 + 50 * 10
    assert main(["explain", "TopK(0.1)", "--model", "transformer", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] > 10**6


@pytest.mark.timeout(60)
def test_one_worker_is_no_plural(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "TopK(0.01)", "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    assert "none, since 1 worker has nobody to exchange with" in shown
    assert "1 workers" not in shown


WRONG_WORDS = [
    ("trian mnist", "did you mean train?"),
    ("frobnicate", "there are demo, train, compare, list, explain"),
    ("train", "required: TASK (see `sparsewire train --help`)"),
    ("train minst", "TASK must be mnist, not 'minst'"),
    ("train mnist --workers four", "--workers must be a whole number, not 'four'"),
    ("train mnist --lr fast", "--lr must be a number, not 'fast'"),
    ("train mnist --worker 4", "unrecognized option --worker; did you mean --workers?"),
    ("train mnist --optimizer adam", "--optimizer must be sgd or adagrad, not 'adam'"),
    ("train mnist --optimizer", "--optimizer needs a value"),
    ("train mnist --hidden wide", "--hidden must be a whole number, not 'wide'"),
    ("train mnist --workers 0", "--workers must be at least 1, not 0"),
    ("train mnist --workers -3", "--workers must be at least 1, not -3"),
    ("train mnist --workers 65", "at most 64"),
    ("train mnist --epochs 0", "--epochs must be at least 1"),
    ("train mnist --batch-size 0", "--batch-size must be at least 1"),
    ("train mnist --lr -1", "--lr must be a positive number"),
    ("train mnist --lr nan", "--lr must be a positive number, not nan"),
    ("train mnist more", "unrecognized argument 'more'"),
    ("train mnist --momentum 1", "--momentum must be in [0, 1)"),
    ("train mnist --hidden 0", "--hidden must be at least 1, not 0"),
    ("train mnist --seed -1", "--seed must be in"),
    ("train mnist --limit 0", "--limit must be at least 1"),
    ("train mnist --port 70000", "--port must be in"),
    ("train mnist --timeout 0", "--timeout must be"),
    ("train mnist --resume", "--resume needs --checkpoint"),
    ("train mnist --checkpoint-every 5", "--checkpoint-every needs --checkpoint"),
    ("train mnist --limit 100 --batch-size 64", "--batch-size 64 on 4 workers takes 256 images"),
    ("train mnist --scheme TopKK(0.01)", "did you mean TopK?"),
    ("train mnist --scheme TopK(0)", "above 0 and at most 1"),
    ("train mnist --scheme TopK(2)", "above 0 and at most 1"),
    ("train mnist --scheme __import__('os')", "import"),
    ("compare mnist --schemes Dense() TopK(2)", "above 0 and at most 1"),
    ("compare mnist --schemes", "--schemes needs at least one value"),
    ("explain", "required: SCHEME (see `sparsewire explain --help`)"),
    ("explain TopK(2)", "above 0 and at most 1"),
    ("explain TopK(0.1) --params 0", "--params must be in 1 to"),
    ("explain TopK(0.1) --params inf", "--params must be in 1 to"),
    ("explain TopK(0.1) --workers 0", "--workers must be at least 1"),
    ("explain TopK(0.1) --model mnist --hidden 0", "--hidden must be at least 1"),
    ("explain TopK(0.1) --model resnet19", "there are mnist, resnet18, transformer, or your own"),
]


@pytest.mark.parametrize(("words", "reason"), WRONG_WORDS, ids=[case[0] for case in WRONG_WORDS])
def test_wrong_words(capsys: pytest.CaptureFixture[str], words: str, reason: str) -> None:
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("sparsewire: ")
    assert shown.err.count("\n") == 1
    assert reason in shown.err


def test_too_many_workers_for_the_cores(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsewire.tools.cli.site.cores", lambda: 2)
    assert cores() >= 1
    assert main(["train", "mnist", "--workers", "33"]) == 2
    assert "too many for 2 cores: at most 32" in capsys.readouterr().err


def test_missing_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "mnist", "--data", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "train-images-idx3-ubyte.gz" in said
    assert "--data" in said


def test_unwritable_output(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    common = ["mnist", "--data", str(data)]
    for words in (
        ["train", *common, "--metrics", str(file / "metrics.jsonl")],
        ["train", *common, "--metrics", str(tmp_path)],
        ["train", *common, "--checkpoint", str(file / "run")],
        ["compare", *common, "--out", str(file / "results")],
        ["compare", *common, "--out", str(file)],
    ):
        assert main(words) == 1
        said = capsys.readouterr().err
        assert said.startswith("sparsewire: cannot write ")
        assert str(tmp_path) in said
        assert said.count("\n") == 1


def test_nothing_to_resume(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "mnist", "--data", str(data), "--checkpoint", str(tmp_path), "--resume"]
    assert main(words) == 1
    assert f"there is no checkpoint in {tmp_path}" in capsys.readouterr().err


def test_compare_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert main(["compare", "mnist"]) == 2
    assert "without torchrun" in capsys.readouterr().err


def test_busy_port(data: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = run("train", "mnist", "--data", str(data), "--port", port)
    assert ended.returncode == 1
    assert f"port {port} cannot be used" in sentence(ended)


def test_damaged_data_through_the_real_entry_point(tmp_path: Path, data: Path) -> None:
    for file in data.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damaged = tmp_path / "t10k-labels-idx1-ubyte.gz"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    ended = run("train", "mnist", "--data", str(tmp_path))
    assert ended.returncode == 1
    assert f"{damaged} is damaged" in sentence(ended)


def test_unknown_scheme_through_the_real_entry_point() -> None:
    ended = run("train", "mnist", "--scheme", "TopKK(0.01)")
    assert ended.returncode == 2
    assert "did you mean TopK?" in sentence(ended)


def test_a_reader_that_has_had_enough() -> None:
    program = f"{sys.executable} -m sparsewire.tools.cli list --json | head -c 1"
    ended = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {program}"],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "{"
    assert ended.stderr == ""
