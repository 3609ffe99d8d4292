"""Labs for users who are not root: the same commands, in a user namespace of their own.

Run as root, these tests give up root's rights first, as in a container that takes them away.
"""

from __future__ import annotations

import functools
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsewire.tools import cli
from sparsewire.tools.cli import options
from sparsewire.tools.lab import rootless, usernamespace

from ..lab.traces import nothing_stays  # noqa: F401
from .conftest import COMMAND, QUICK, alive, environment, sentence, wait_for

# The kernel lets root be mapped to root by whom it trusts with this last right only.
WITHOUT_RIGHTS = ["setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all", "--"]
ORDINARY = [] if os.geteuid() else WITHOUT_RIGHTS
PYTHON = [*ORDINARY, sys.executable]


@functools.cache
def why_not() -> str:
    """Why an ordinary user cannot have labs here."""
    if sys.platform != "linux" or (ORDINARY and shutil.which(ORDINARY[0]) is None):
        return "these tests need Linux and setpriv"
    ask = "from sparsewire.tools.lab import rootless; print(rootless.refusal() or '')"
    return run(*PYTHON, "-c", ask).stdout.strip()


def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env=environment(**more), capture_output=True, text=True, timeout=100
    )


pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.xdist_group("lab"),
    pytest.mark.usefixtures("nothing_stays"),
]
needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not())
LAB = [*ORDINARY, *COMMAND, "lab"]


def relatives(pid: int) -> set[int]:
    """All other processes in the user namespace of `pid`."""
    place = os.readlink(f"/proc/{pid}/ns/user")
    assert place != os.readlink("/proc/self/ns/user")
    found = set()
    for other in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        try:
            if other != pid and os.readlink(f"/proc/{other}/ns/user") == place:
                found.add(other)
        except OSError:
            continue
    return found


class Running:
    """A lab of two hosts, in each of which a shell and its child wait."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        program = "sleep 500 & echo here; wait"
        words = ["--hosts", "2", "--rate", "50mbit", "--no-check", "--logs", str(folder)]
        self.process = subprocess.Popen(
            [*LAB, *words, "--", "sh", "-c", program],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        logs = [folder / f"rank-{rank}.log" for rank in range(2)]
        try:
            wait_for(lambda: all(log.exists() and "here" in log.read_text() for log in logs))
        except BaseException:
            self.process.kill()  # or it would outlive the test, and be in the way of others
            raise
        self.relatives = relatives(self.process.pid)
        assert len(self.relatives) >= 4, "two processes on each host"

    def assert_nothing_stays(self) -> None:
        wait_for(lambda: not any(map(alive, self.relatives)))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A lab under way."""
    one = Running(tmp_path / "logs")
    yield one
    one.process.kill()
    one.process.communicate()


@needs_namespaces
def test_links_are_as_slow_as_asked() -> None:
    ended = run(*LAB, "--hosts", "2", "--rate", "20mbit", "--rate", "1=5mbit")
    assert ended.returncode == 0, ended.stderr
    lines = [line.split() for line in ended.stdout.splitlines() if line.startswith("host")]
    for line, asked in zip(lines, (20, 5), strict=True):
        assert line[2] == f"{asked}mbit"
        # Less only if the machine is busy; not shaped they would be a hundred times as fast.
        assert all(0.5 < float(way.removesuffix("mbit")) / asked < 1.1 for way in line[3:])


@needs_namespaces
def test_hosts_are_apart_and_files_are_the_users(tmp_path: Path) -> None:
    program = 'readlink /proc/self/ns/net; pwd; echo "$COLOUR"; touch made-$RANK'
    command = [*LAB, "--hosts", "2", "--no-check", "--", "sh", "-c", program]
    ended = subprocess.run(
        command, env=environment(COLOUR="blue"), cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    told = [log.read_text().splitlines() for log in sorted(tmp_path.glob("runs/*/rank-*.log"))]
    places = {lines.pop(0) for lines in told} | {os.readlink("/proc/self/ns/net")}
    assert len(places) == 3
    assert told == [[str(tmp_path), "blue"]] * 2
    for path in [tmp_path / "made-0", tmp_path / "made-1", *tmp_path.glob("runs/*/*")]:
        assert path.stat().st_uid == os.geteuid()


@needs_namespaces
def test_the_code_of_the_rank_that_failed(tmp_path: Path) -> None:
    words = ["--hosts", "2", "--no-check", "--logs", str(tmp_path)]
    ended = run(*LAB, *words, "--", "sh", "-c", "test $RANK = 0 || exit 7; sleep 500")
    assert ended.returncode == 7
    assert sentence(ended) == f"sparsewire: rank 1 ended with code 7 (logs in {tmp_path})"


@needs_namespaces
def test_ctrl_c_at_a_terminal(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    with open(slave, "r+b", buffering=0) as terminal:
        # The session's first process takes the terminal, as a shell does.
        take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        program = ["--hosts", "2", "--no-check", "--logs", str(tmp_path)]
        program += ["--", "sh", "-c", "sleep 500 & echo here; wait"]
        words = [*LAB, *program]
        process = subprocess.Popen(
            [sys.executable, "-c", f"{take}os.execvp(sys.argv[1], sys.argv[1:])", *words],
            env=environment(),
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    wait_for(lambda: all(log.exists() and "here" in log.read_text() for log in logs))
    inside = relatives(process.pid)
    os.write(master, b"\x03")
    assert process.wait(timeout=30) == 130
    said = b""
    try:
        while part := os.read(master, 1 << 16):
            said += part
    except OSError:  # the terminal is closed
        os.close(master)
    assert said.count(b"stopping; press again") == 1
    assert said.count(b"sparsewire: stopped") == 1
    assert b"Traceback" not in said
    wait_for(lambda: not any(map(alive, inside)))


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_leave_nothing(running: Running, number: signal.Signals) -> None:
    running.process.send_signal(number)
    code = running.process.wait(timeout=30)
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    running.assert_nothing_stays()


@needs_namespaces
def test_rates_are_set_from_elsewhere(running: Running, tmp_path: Path) -> None:
    ended = run(*LAB, "--set", "30mbit", "--set", "1=20mbit")
    assert ended.returncode == 0, ended.stderr
    lab = re.fullmatch(r"lab (\w+): 30mbit, 1=20mbit\n", ended.stdout)
    assert lab is not None
    join = [sys.executable, "-I", "-S", usernamespace.__file__, str(running.process.pid)]
    for host, rate in enumerate(("30Mbit", "20Mbit")):
        shown = ["tc", "-n", f"sparsewire-{lab[1]}-host{host}", "qdisc", "show", "dev", "eth0"]
        assert f"rate {rate}" in run(*ORDINARY, *join, *shown).stdout
    ended = run(*LAB, "--set", "2=30mbit")
    assert ended.returncode == 1
    assert sentence(ended) == "sparsewire: there is no host 2: hosts are 0 to 1"
    ended = run(*LAB, "--set", "30mbit", "--lab", "c0ffee00")
    assert ended.returncode == 1
    assert "no lab c0ffee00 of yours runs here" in sentence(ended)
    other = Running(tmp_path / "other")
    try:
        ended = run(*LAB, "--set", "30mbit")
        assert ended.returncode == 2
        assert "several labs run: choose one of --lab" in sentence(ended)
    finally:
        other.process.kill()
        other.process.communicate()


@needs_namespaces
def test_training_on_slow_links(data: Path) -> None:
    words = ["--rate", "100mbit", "--epochs", "1", "--data", str(data), "--quiet", "--json"]
    ended = run(*ORDINARY, *COMMAND, "train", "mnist", *QUICK, *words)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["workers"] == 2


@needs_namespaces
def test_run_keeps_what_others_have_there() -> None:
    ask = ["sh", "-c", "touch /run/netns; ls -A /run"]
    script = [sys.executable, "-I", "-S", usernamespace.__file__, "new"]
    ended = run(*ORDINARY, *script, *ask)
    ours = {"netns", "sparsewire"}
    assert set(ended.stdout.split()) == (set(os.listdir("/run")) - ours) | {"netns"}
    folders = [path for path in Path("/run").iterdir() if path.is_dir() and path.name not in ours]
    for folder in folders:
        inside = run(*ORDINARY, *script, "stat", "-L", "-c", "%d:%i", str(folder)).stdout
        assert inside == f"{folder.stat().st_dev}:{folder.stat().st_ino}\n"


@needs_namespaces
def test_python_says_how_to_get_a_lab() -> None:
    program = """
from sparsewire.tools.lab import Lab, LabError, obstacle
print(obstacle())
try:
    Lab(hosts=1).__enter__()
except LabError as error:
    print(error)
"""
    first, second = run(*PYTHON, "-c", program).stdout.splitlines()
    assert first == second
    assert "with sudo, or as a command of `sparsewire lab --hosts 1 --no-check --`" in first


@needs_namespaces
def test_the_way_that_is_named_works(tmp_path: Path) -> None:
    program = (
        "from sparsewire.tools.lab import Lab; print(Lab(hosts=1).__enter__().check()[0].asked)"
    )
    words = ["--hosts", "1", "--no-check", "--logs", str(tmp_path)]
    ended = run(*LAB, *words, "--", sys.executable, "-c", program)
    assert (ended.returncode, ended.stdout) == (0, "None\n"), ended.stderr


FORBIDDEN = [
    *("unshare", "--user", "--map-root-user", "sh", "-c"),
    'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"',
    *("sh", *WITHOUT_RIGHTS),
]


@needs_namespaces
def test_where_they_are_forbidden_the_setting_is_named() -> None:
    ended = run(*FORBIDDEN, *COMMAND, "lab", "--hosts", "2")
    assert ended.returncode == 1
    said = sentence(ended)
    assert "which user.max_user_namespaces=0 forbids" in said
    assert "sudo sysctl user.max_user_namespaces=15000" in said
    assert "add --loopback" in said


@needs_namespaces
def test_the_demo_does_without(data: Path, tmp_path: Path) -> None:
    words = ["--data", str(data), "--out", str(tmp_path / "out")]
    with subprocess.Popen(
        [*FORBIDDEN, *COMMAND, "demo", *words], env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        opening = process.stderr.readline() + process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
    assert "over loopback" in opening
    assert "user.max_user_namespaces=0 forbids" in opening


@pytest.mark.parametrize(
    ("command", "needs"),
    [
        (options.Demo(), True),
        (options.Lab(), True),
        (options.Lab(loopback=True), False),
        (options.Lab(set=("1gbit",)), False),
        (options.Train(task="mnist"), False),
        (options.Train(task="mnist", rate="1gbit"), True),
        (options.Compare(task="mnist", rate="1gbit"), True),
        (options.BenchStep(), True),
        (options.BenchTrain(loopback=True), False),
        (options.BenchScale(), True),
        (options.List(), False),
    ],
)
def test_who_starts_anew(
    command: options.Command, needs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr("sparsewire.tools.cli.parse.parse", lambda words: command)
    monkeypatch.setattr("sparsewire.tools.cli._run", lambda command: calls.append("run") or 0)
    monkeypatch.setattr(rootless, "enter", lambda: calls.append("enter"))
    monkeypatch.setattr(sys, "argv", ["sparsewire", "anything"])
    assert cli.main() == 0
    assert calls == ["enter", "run"][not needs :]
    calls.clear()
    assert cli.main(["anything"]) == 0
    assert calls == ["run"], "a program that calls main() goes on"


def test_root_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rootless, "privileged", lambda: True)
    monkeypatch.setattr(os, "execv", lambda *words: pytest.fail("started anew"))
    rootless.enter()


@needs_namespaces
def test_who_is_privileged(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = "from sparsewire.tools.lab import rootless; print(rootless.privileged())"
    script = [sys.executable, "-I", "-S", usernamespace.__file__, "new"]
    assert run(*PYTHON, "-c", ask).stdout == "False\n"
    assert run(*ORDINARY, *script, sys.executable, "-c", ask).stdout == "True\n"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not rootless.privileged()
