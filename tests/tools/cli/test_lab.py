"""`sparsewire lab` as a person uses it: exit codes, logs, Ctrl-C, other terminals, no root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsewire.tools.cli import main
from sparsewire.tools.lab import Lab, obstacle, records

from ...patience import wait_for
from ..lab.traces import namespaces, needs_lab, nothing_stays  # noqa: F401
from .conftest import COMMAND, QUICK, environment, run, sentence

pytestmark = [
    pytest.mark.xdist_group("lab"),
    pytest.mark.usefixtures("nothing_stays"),
]
PLACES = [pytest.param("--no-check", marks=needs_lab, id="lab"), "--loopback"]


@pytest.mark.parametrize("place", PLACES)
def test_all_is_well(tmp_path: Path, place: str) -> None:
    program = "import os; print('rank', os.environ['RANK'], os.environ['MASTER_ADDR'])"
    words = ["--hosts", "2", place, "--logs", str(tmp_path), "--", "python", "-c", program]
    ended = run("lab", *words)
    assert ended.returncode == 0, ended.stderr
    address = "127.0.0.1" if place == "--loopback" else "10.77.0.1"
    assert ended.stdout == f"rank 0 {address}\n"
    assert f"logs: {tmp_path}" in ended.stderr
    for rank in range(2):
        assert (tmp_path / f"rank-{rank}.log").read_text() == f"rank {rank} {address}\n"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("end", "code"), [("exit 3", 3), ("kill -9 $$", 137)])
def test_one_rank_fails(tmp_path: Path, place: str, end: str, code: int) -> None:
    fails = f'until [ -e ready-0 -a -e ready-2 ]; do sleep 0.01; done; echo "oh no" >&2; {end}'
    waits = "trap 'echo asked to end; exit' TERM; touch ready-$RANK; sleep 500 & wait"
    program = f"cd {tmp_path}; if [ $RANK = 1 ]; then {fails}; fi; {waits}"
    words = ["--hosts", "3", place, "--logs", str(tmp_path), "--", "sh", "-c", program]
    ended = run("lab", *words)
    assert ended.returncode == code
    for rank in (0, 2):
        assert (tmp_path / f"rank-{rank}.log").read_text() == "asked to end\n"
    fate = "ended with code 3" if code == 3 else "was ended by SIGKILL"
    assert sentence(ended) == f"sparsewire: rank 1 {fate} (logs in {tmp_path})"
    assert f"the end of {tmp_path}/rank-1.log:\n  oh no\n" in ended.stderr


class Running:
    """A lab command under way, whose ranks have all begun."""

    def __init__(self, folder: Path, program: str, *words: str) -> None:
        self.logs = folder
        options = ["--hosts", "2", "--logs", str(folder), *words]
        whole = f"import signal, time; print('here', flush=True); {program}"
        self.process = subprocess.Popen(
            [*COMMAND, "lab", *options, "--", sys.executable, "-c", whole],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for(lambda: all("here" in self.log(rank) for rank in range(2)))

    def log(self, rank: int) -> str:
        path = self.logs / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate()
        return self.process.returncode, out, err


@pytest.fixture
def started() -> Iterator[list[Running]]:
    """Ends what a failed test leaves."""
    made: list[Running] = []
    yield made
    for one in made:
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_is_passed_on(tmp_path: Path, place: str, started: list[Running]) -> None:
    started.append(Running(tmp_path, "time.sleep(500)", place))
    started[0].process.send_signal(signal.SIGINT)
    code, _, said = started[0].end()
    assert code == 130
    assert "stopping; press again to stop at once" in said
    assert f"sparsewire: stopped (logs in {tmp_path})" in said
    assert all("KeyboardInterrupt" in started[0].log(rank) for rank in range(2))


@needs_lab
def test_a_second_ctrl_c_kills(tmp_path: Path, started: list[Running]) -> None:
    stubborn = (
        "signal.signal(signal.SIGINT, lambda *_: print('no')); [time.sleep(1) for _ in 'x' * 99]"
    )
    started.append(Running(tmp_path, stubborn, "--no-check"))
    started[0].process.send_signal(signal.SIGINT)
    wait_for(lambda: all("no" in started[0].log(rank) for rank in range(2)))
    assert started[0].process.poll() is None
    started[0].process.send_signal(signal.SIGINT)
    assert started[0].end()[0] == 130


@needs_lab
def test_sigterm_is_passed_on(tmp_path: Path, started: list[Running]) -> None:
    polite = "signal.signal(signal.SIGTERM, lambda *_: exit(print('bye'))); time.sleep(500)"
    started.append(Running(tmp_path, polite, "--no-check"))
    started[0].process.send_signal(signal.SIGTERM)
    assert started[0].end()[0] == 143
    assert all("bye" in started[0].log(rank) for rank in range(2))


@needs_lab
def test_sigterm_ends_ranks_that_ignore_it(tmp_path: Path, started: list[Running]) -> None:
    deaf = "[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print('deaf'); time.sleep(5000)"
    started.append(Running(tmp_path, deaf, "--no-check"))
    wait_for(lambda: all("deaf" in started[0].log(rank) for rank in range(2)))
    started[0].process.send_signal(signal.SIGTERM)
    code, _, said = started[0].end()
    assert code == 143
    assert "press again" not in said


@needs_lab
def test_links_are_measured_and_shown(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(5):  # measured again if the machine was busy with other things
        assert main(["lab", "--hosts", "1", "--rate", "50mbit"]) == 0
        shown = capfd.readouterr().out
        (line,) = (line for line in shown.splitlines() if line.startswith("host 0"))
        asked, up, down = line.split()[2:]
        assert asked == "50mbit"
        fits = all(45 < float(rate.removesuffix("mbit")) < 55 for rate in (up, down))
        assert fits or "warning: host 0 is off by more than 10 %" in shown
        if fits:
            break
    assert fits


@needs_lab
def test_off_by_more_than_a_tenth_is_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sparsewire.tools.lab.plan.bucket", lambda rate: (1600, 3200))
    monkeypatch.setattr("sparsewire.tools.lab.links._SECONDS", 0.05)
    assert main(["lab", "--hosts", "1", "--rate", "10gbit"]) == 0
    assert "warning: host 0 is off by more than 10 %" in capfd.readouterr().out


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No lab but this test's."""
    monkeypatch.setattr(records, "_HOME", tmp_path / "run")


@needs_lab
@pytest.mark.usefixtures("alone")
def test_rates_are_set_from_elsewhere(capfd: pytest.CaptureFixture[str]) -> None:
    with Lab(hosts=2, rate="100mbit") as lab:
        assert main(["lab", "--set", "50mbit", "--set", "1=20mbit"]) == 0
        assert capfd.readouterr().out == f"lab {lab.id}: 50mbit, 1=20mbit\n"
        assert [link.asked for link in lab.check()] == [50_000_000, 20_000_000]
        with Lab(hosts=1) as other:
            assert main(["lab", "--set", "1gbit"]) == 2
            said = capfd.readouterr().err
            assert "several labs run: choose one of --lab" in said
            assert lab.id in said
            assert main(["lab", "--set", "1gbit", "--lab", other.id]) == 0
    assert main(["lab", "--set", "1gbit"]) == 1
    assert main(["lab", "--set", "1gbit", "--lab", lab.id]) == 1
    said = capfd.readouterr().err
    assert said.count("no lab of yours runs on this machine") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "5mb"], "'5mb' is no rate, since mb is no unit"),
        (["--rate", "1gbit", "--rate", "2gbit"], "write HOST=RATE for all but one"),
        (["--rate", "x=1gbit"], "--rate takes RATE or HOST=RATE, not 'x=1gbit'"),
        (["--rate", "4=1gbit"], "there is no host 4: hosts are 0 to 3"),
        (["--hosts", "0"], "a lab has 1 to 200 hosts, not 0"),
        (["--hosts", "0", "--loopback", "--", "true"], "at least one host, not 0"),
        (["--oversubscribe", "4"], "oversubscribe needs a rate"),
        (["--lab", "c0ffee00"], "--lab says which lab --set is for"),
        (["--loopback"], "--loopback runs a command: write it behind --"),
        (["--", "no-such-program"], "there is no command 'no-such-program' to run"),
        (["python", "train.py"], "unrecognized argument 'python'; write the command to run"),
    ],
)
def test_mistakes(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", *words]) == 2
    shown = capfd.readouterr().err
    assert shown.startswith("sparsewire: ")
    assert said in shown


@pytest.mark.parametrize("missing", ["root", "tc"])
def test_what_is_missing_is_explained(
    missing: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000 if missing == "root" else 0)
    monkeypatch.setattr("sparsewire.tools.lab.cluster.find", lambda name: name == "ip" or None)
    obstacle.cache_clear()
    try:
        assert main(["lab", "--rate", "1gbit"]) == 1
    finally:
        obstacle.cache_clear()
    said = capfd.readouterr().err
    assert ("with sudo" if missing == "root" else "needs the command tc: install") in said
    assert "add --loopback" in said


@needs_lab
def test_training_joins_as_ranks(tmp_path: Path, data: Path) -> None:
    training = [*QUICK[2:], "--epochs", "1", "--data", str(data)]
    words = ["--hosts", "2", "--rate", "200mbit", "--no-check", "--logs", str(tmp_path)]
    ended = run("lab", *words, "--", *COMMAND, "train", "mnist", *training)
    assert ended.returncode == 0, ended.stderr
    assert "test accuracy" in ended.stdout
    assert "2 workers" in (tmp_path / "rank-0.log").read_text()
