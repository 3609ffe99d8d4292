"""Real labs: links as slow as asked, hosts that see each other and nothing else."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from sparsewire.tools.lab import Lab, LabError, Link, running
from sparsewire.tools.lab.commands import run

from .traces import namespaces, needs_lab

pytestmark = [needs_lab, pytest.mark.xdist_group("lab")]


def measured(lab: Lab) -> list[Link]:
    """What the links carry; measured again if the machine was busy with other things."""
    for _ in range(5):
        links = lab.check()
        if all(link.fits for link in links):
            break
    return links


def arriving(count: Callable[[], int], expected: object) -> float:
    """Bits per second once buckets are empty; measured again if the machine was busy."""
    time.sleep(0.4)
    for _ in range(5):
        before, began = count(), time.monotonic()
        time.sleep(0.5)
        rate = 8 * (count() - before) / (time.monotonic() - began)
        if rate == expected:
            break
    return rate


def test_links_are_as_slow_as_asked_and_change_while_used() -> None:
    told: list[tuple[int, int]] = []
    with Lab(hosts=2, rate="1gbit", rates={1: "50mbit"}) as lab:
        lab.check(lambda done, total: told.append((done, total)))
        assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
        links = measured(lab)
        assert [link.asked for link in links] == [10**9, 5 * 10**7]
        assert all(link.fits for link in links), links

        with _stream(lab, 0, 1) as received:
            lab.set_rate("20mbit", host=1)
            expected = pytest.approx(20e6 * 0.956, rel=0.1)
            assert arriving(received, expected) == expected

        lab.set_rate("30mbit")
        assert [link.asked for link in measured(lab)] == [3 * 10**7] * 2
        with pytest.raises(LabError, match="there is no host 7"):
            lab.set_rate("1gbit", host=7)


class _stream:
    """Data that flows from one host to another for as long as the block runs."""

    def __init__(self, lab: Lab, source: int, target: int, port: int = 5000) -> None:
        self._received = 0
        with lab.inside(target):
            listener = socket.create_server((lab.addresses[target], port))
        with lab.inside(source):
            self._sender = socket.create_connection((lab.addresses[target], port), 5)
        self._receiver = listener.accept()[0]
        listener.close()
        self._threads = [threading.Thread(target=t) for t in (self._send, self._receive)]

    def __enter__(self) -> Callable[[], int]:
        for thread in self._threads:
            thread.start()
        return lambda: self._received

    def __exit__(self, *error: object) -> None:
        for end in (self._sender, self._receiver):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._sender.close()
        self._receiver.close()

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._sender.sendall(bytes(1 << 16))

    def _receive(self) -> None:
        with contextlib.suppress(OSError):
            while content := self._receiver.recv(1 << 16):
                self._received += len(content)


def test_many_senders_share_one_link() -> None:
    with Lab(hosts=4, rate="50mbit") as lab:
        streams = [_stream(lab, source, 0, 5000 + source) for source in (1, 2, 3)]
        received = [stream.__enter__() for stream in streams]
        expected = pytest.approx(50e6 * 0.956, rel=0.1)
        rate = arriving(lambda: sum(count() for count in received), expected)
        for stream in streams:
            stream.__exit__()
    assert rate == expected


def test_racks_share_what_lies_between_them() -> None:
    with Lab(hosts=4, rate="40mbit", oversubscribe=4) as lab:
        *hosts, between = measured(lab)
        assert [link.host for link in hosts] == [0, 1, 2, 3]
        assert (between.host, between.asked, between.fits) == (None, 20_000_000, True)
        with _stream(lab, 0, 2, 5000) as near, _stream(lab, 1, 3, 5001) as far:
            expected = pytest.approx(20e6 * 0.956, rel=0.1)
            assert arriving(lambda: near() + far(), expected) == expected


def test_without_a_rate_links_are_fast() -> None:
    with Lab(hosts=1) as lab:
        (link,) = lab.check()
    assert link.asked is None
    assert link.fits
    assert min(link.up, link.down) > 10**9


def test_hosts_see_each_other_and_nothing_else() -> None:
    with Lab(hosts=2) as lab:
        command = [sys.executable, "-c", "import socket; print(socket.if_nameindex())"]
        process = lab.start(1, command, stdout=subprocess.PIPE, text=True)
        said = process.communicate()[0]
        assert "eth0" in said
        assert said.count("(") == 2, "lo and eth0"
        with lab.inside(0), pytest.raises(OSError, match="unreachable"):
            socket.create_connection(("192.0.2.1", 80), timeout=1)
    assert "eth0" not in "".join(name for name in namespaces(lab.id))


def test_inside_is_left_again_even_after_an_error() -> None:
    def here() -> str:
        return os.readlink("/proc/thread-self/ns/net")

    before = here()
    with Lab(hosts=2) as lab:
        with lab.inside(0):
            first = here()
            with lab.inside(1):
                second = here()
            assert here() == first
        with contextlib.suppress(ZeroDivisionError), lab.inside(1):
            assert here() == second
            raise ZeroDivisionError
        assert len({before, first, second}) == 3
    assert here() == before
    with pytest.raises(LabError, match="its lab is closed"), lab.inside(0):
        pass


def test_environment() -> None:
    lab = Lab(hosts=3)
    told = lab.environment(2, 1234)
    assert {name: told[name] for name in ("RANK", "WORLD_SIZE", "NODE_RANK")} == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "NODE_RANK": "2",
    }
    assert (told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("0", "1")
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == (lab.addresses[0], "1234")
    assert {told[f"{library}_SOCKET_IFNAME"] for library in ("GLOO", "NCCL", "TP")} == {"eth0"}
    assert int(told["OMP_NUM_THREADS"]) >= 1


def test_two_labs_at_once() -> None:
    with Lab(hosts=2, rate="20mbit") as one, Lab(hosts=2, rate="40mbit") as two:
        assert one.id != two.id
        assert one.addresses == two.addresses
        assert {one.id, two.id} <= {plan.id for plan in running()}
        one.set_rate("10mbit")
        assert [link.asked for link in measured(one)] == [10**7] * 2
        assert [link.asked for link in measured(two)] == [4 * 10**7] * 2
    assert not {one.id, two.id} & {plan.id for plan in running()}


def test_a_failed_command_is_told_in_its_own_words() -> None:
    with pytest.raises(LabError) as told:
        run(["ip", "-n", "sparsewire-none", "link"])
    assert str(told.value).startswith("`ip -n sparsewire-none link` failed: Cannot open network")
    with pytest.raises(LabError, match="there is no command nosuch: install iproute2"):
        run(["nosuch"])


def test_a_lab_that_cannot_be_built_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsewire.tools.lab.plan.INTERFACE", "a-name-that-is-too-long")
    lab = Lab(hosts=2)
    with pytest.raises(LabError, match=r"ip -n sparsewire-.* failed: "):
        lab.__enter__()
    assert not namespaces(lab.id)
    assert lab.id not in {plan.id for plan in running()}
    with pytest.raises(LabError, match=f"no lab {lab.id} runs here"):
        lab.set_rate("1gbit")
