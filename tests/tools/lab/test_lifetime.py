"""However a lab ends, nothing of it stays, and nothing else is touched."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparsewire.tools.lab import Lab, Loopback, records, running
from sparsewire.tools.lab.cluster import sweep
from sparsewire.tools.lab.commands import run

from ...patience import wait_for
from ..cli.conftest import alive, environment
from .traces import namespaces, needs_lab

pytestmark = pytest.mark.xdist_group("lab")

OWNER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup leaves it to be ignored
signal.signal(signal.SIGINT, signal.default_int_handler)  # and a shell, in the background
from sparsewire.tools.lab import Lab
with Lab(hosts=2, rate="10mbit") as lab:
    family = ["sh", "-c", "sleep 500 & echo $!; echo $$; wait"]
    child = lab.start(1, family, stdout=subprocess.PIPE, text=True)
    print(lab.id, child.stdout.readline().strip(), child.stdout.readline().strip(), flush=True)
    time.sleep(500)
"""


@contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[str], str, list[int]]]:
    """A process with a lab, the lab's id, and what runs in it."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        words = process.stdout.readline().split()
        assert len(namespaces(words[0])) == 3
        yield process, words[0], [int(word) for word in words[1:]]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        sweep()


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_the_owner(number: signal.Signals) -> None:
    with owner() as (process, lab, inside):
        process.send_signal(number)
        process.wait()
        assert process.returncode in (-number, 128 + number)
        assert not namespaces(lab)
        assert not any(alive(pid) for pid in inside)


@needs_lab
def test_what_kill_9_leaves_is_swept_by_the_next_lab() -> None:
    stranger = f"sparsewire-{secrets.token_hex(4)}-host0"  # like a lab's, but not recorded
    with owner() as (process, lab, (grandchild, child)), owner() as (_, other, _):
        process.kill()
        process.wait()
        wait_for(lambda: not alive(child))  # by the kernel
        run(["ip", "netns", "add", stranger])
        try:
            with Lab(hosts=1):
                assert not namespaces(lab)
                assert not alive(grandchild)
                assert len(namespaces(other)) == 3, "its owner lives"
            assert stranger in namespaces()
        finally:
            run(["ip", "netns", "delete", stranger])


@needs_lab
def test_a_lab_of_a_recycled_process_number_is_swept() -> None:
    with owner() as (process, lab, _):
        (record,) = (record for record in records.read_all() if record.plan.id == lab)
        process.kill()
        process.wait()
        assert record.started is not None
        records.Record(record.plan, os.getpid(), record.started).write()
        sweep()
        assert not namespaces(lab)
        assert lab not in {record.plan.id for record in records.read_all()}


@needs_lab
def test_an_error_in_the_block() -> None:
    lab = Lab(hosts=1)
    with contextlib.suppress(ZeroDivisionError), lab:
        child = lab.start(0, ["sleep", "500"])
        raise ZeroDivisionError
    assert child.returncode == -signal.SIGKILL
    assert not namespaces(lab.id)
    lab.close()  # again: nothing


@needs_lab
def test_a_forked_copy_does_not_remove_the_lab() -> None:
    with Lab(hosts=1) as lab:
        pid = os.fork()
        if not pid:
            lab.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert len(namespaces(lab.id)) == 2
        assert lab.id in {plan.id for plan in running()}


@needs_lab
def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with Lab(hosts=1):
        pass
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize("place", [pytest.param(Lab, marks=needs_lab), Loopback])
def test_processes_outlive_the_thread_that_started_them(place: type[Lab | Loopback]) -> None:
    with place(hosts=2) as made:
        children: list[subprocess.Popen[bytes]] = []

        def start() -> None:
            children.append(made.start(1, ["sleep", "500"], cwd="/"))

        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        with pytest.raises(subprocess.TimeoutExpired):
            children[0].wait(timeout=0.3)
    assert children[0].returncode == -signal.SIGKILL


def test_loopback(tmp_path: Path) -> None:
    with Loopback(hosts=2) as place:
        told = place.environment(1, 4321)
        assert (told["RANK"], told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("1", "1", "2")
        assert (told["MASTER_ADDR"], told["NODE_RANK"]) == ("127.0.0.1", "0")
        assert place.addresses == ["127.0.0.1"] * 2
        command = ["sh", "-c", 'test "$RANK" = 1 && test -n "$PATH"']
        with place.inside(1):
            assert place.start(1, command, told, cwd=tmp_path).wait() == 0
