"""Measure links: one TCP transfer at a time, over one link, in each direction.

The other end of every transfer is the switch itself, so that no second link takes part.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from .commands import LabError
from .namespaces import inside
from .plan import Plan, address, switch_address
from .rates import bucket

_SECONDS = 0.5
_CHUNK = 1 << 20
_PATIENCE = 10.0
_PORT = 29499


@dataclass(frozen=True)
class Link:
    """The requested rate of one link and its measured TCP throughput, in bits per second.

    `host` is None for the link between two racks, and `asked` is None if it is not shaped.
    """

    host: int | None
    asked: int | None
    up: float
    down: float

    @property
    def name(self) -> str:
        """The link in words."""
        return "between racks" if self.host is None else f"host {self.host}"

    @property
    def fits(self) -> bool:
        """Whether both directions are within a tenth of the requested rate."""
        return self.asked is None or all(
            abs(measured / self.asked - 1) <= 0.1 for measured in (self.up, self.down)
        )


def measure(plan: Plan, progress: Callable[[int, int], None] | None = None) -> list[Link]:
    """Measure every link of a lab, while nothing else runs in it.

    Args:
        progress: called with the number of transfers done and their total.
    """
    ends: list[tuple[int | None, int | None, _End, _End]] = []
    for host, rate in enumerate(plan.rates):
        rack = plan.rack_of(host)
        near = plan.host(host), address(host)
        ends.append((host, rate, near, (plan.rack(rack), switch_address(rack))))
    if plan.trunk is not None:
        first, second = ((plan.rack(rack), switch_address(rack)) for rack in range(2))
        ends.append((None, plan.trunk, first, second))
    links = []
    for number, (link, asked, near, far) in enumerate(ends):
        speeds = []
        for way, (source, target) in enumerate([(near, far), (far, near)]):
            speeds.append(_transfer(source, target, asked))
            if progress is not None:
                progress(2 * number + way + 1, 2 * len(ends))
        links.append(Link(link, asked, *speeds))
    return links


_End = tuple[str, str]  # a namespace and an address in it


def _transfer(source: _End, target: _End, rate: int | None) -> float:
    """The bits per second that arrive at `target` once the token bucket is empty."""
    with ExitStack() as stack:
        try:
            sender, receiver = _connect(source, target, stack)
            sending = threading.Thread(target=_send, args=(sender,), daemon=True)
            sending.start()
            stack.callback(sending.join)
            stack.callback(sender.shutdown, socket.SHUT_RDWR)
            # The contents of the bucket and of the queue come on top of the rate.
            _receive(receiver, 2 * sum(bucket(rate)) if rate else 0, 0.05)
            return _receive(receiver, 0, _SECONDS)
        except OSError as error:
            raise LabError(f"nothing comes from {source[1]} to {target[1]}: {error}") from error


def _connect(source: _End, target: _End, stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    with inside(target[0]):
        listener = stack.enter_context(socket.create_server((target[1], _PORT)))
        listener.settimeout(_PATIENCE)
    with inside(source[0]):
        sender = stack.enter_context(socket.create_connection((target[1], _PORT), _PATIENCE))
    receiver = stack.enter_context(listener.accept()[0])
    receiver.settimeout(_PATIENCE)
    return sender, receiver


def _send(sender: socket.socket) -> None:
    """Send until the connection is closed."""
    content = bytes(_CHUNK)
    try:
        while True:
            sender.sendall(content)
    except OSError:
        return


def _receive(receiver: socket.socket, least: int, seconds: float) -> float:
    """Receive at least so much for at least so long, and return the bits per second."""
    capacity = bytearray(_CHUNK)
    begin = time.perf_counter()
    received, passed = 0, 0.0
    while received < least or passed < seconds:
        # The kernel throws the bytes away itself: copying them would slow fast links down.
        count = receiver.recv_into(capacity, _CHUNK, socket.MSG_TRUNC)
        if not count:
            raise ConnectionError("the connection ended")
        received += count
        passed = time.perf_counter() - begin
    return 8 * received / passed
