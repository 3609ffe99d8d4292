"""The layout of a lab, and the `ip` and `tc` commands that build it.

    host0 eth0 ─tbf▶──◀tbf─ port0 ┐                          ┌ port2 ─tbf▶──◀tbf─ eth0 host2
                                  ├ rack0 ─tbf▶──◀tbf─ rack1 ┤
    host1 eth0 ─tbf▶──◀tbf─ port1 ┘                          └ port3 ─tbf▶──◀tbf─ eth0 host3

Without oversubscription there is only rack0. Every host and every rack is a namespace, so that
nothing lies in the machine's own. Nothing here runs anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .commands import LabError
from .rates import bucket, show_rate

INTERFACE = "eth0"
_NETWORK = "10.77.0"  # of every lab, since labs do not see each other
MOST_HOSTS = 200
_ID = re.compile(r"[0-9a-f]{8}")

Command = list[str]


@dataclass(frozen=True)
class Plan:
    """One lab: how fast each host's link is, and how scarce the way between two racks.

    Args:
        id: eight hexadecimal digits, part of every namespace's name.
        rates: each host's, in bits per second; None is not shaped.
        rate: that of a host without a rate of its own.
        oversubscribe: how many times more the hosts of a rack can send than the way out of it.
    """

    id: str
    rates: tuple[int | None, ...]
    rate: int | None = None
    oversubscribe: float = 1.0

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise LabError(f"{self.id!r} is no lab's id, which is eight digits of 0-9 and a-f")
        if not 1 <= len(self.rates) <= MOST_HOSTS:
            raise LabError(f"a lab has 1 to {MOST_HOSTS} hosts, not {len(self.rates)}")
        if not 1 <= self.oversubscribe <= 1000:
            raise LabError(f"oversubscribe must lie in 1 to 1000, not {self.oversubscribe:g}")
        if self.racks > 1 and (self.rate is None or len(self.rates) < 2):
            raise LabError("oversubscribe needs a rate and at least two hosts, one in each rack")

    @property
    def racks(self) -> int:
        """The number of switches."""
        return 2 if self.oversubscribe > 1 else 1

    @property
    def trunk(self) -> int | None:
        """The rate of the link between two racks, if there are two."""
        if self.racks == 1 or self.rate is None:
            return None
        return int(len(self.rates) / 2 * self.rate / self.oversubscribe)

    @property
    def namespaces(self) -> list[str]:
        """Every namespace."""
        racks = [self.rack(rack) for rack in range(self.racks)]
        return racks + [self.host(host) for host in range(len(self.rates))]

    def host(self, host: int) -> str:
        """A host's namespace."""
        return f"sparsewire-{self.id}-host{host}"

    def rack(self, rack: int) -> str:
        """A switch's namespace."""
        return f"sparsewire-{self.id}-rack{rack}"

    def rack_of(self, host: int) -> int:
        """The switch that a host hangs on: the first half on one, the rest on the other."""
        return host * self.racks // len(self.rates)

    def with_rate(self, rate: int, host: int | None = None) -> Plan:
        """The same lab with one host's link, or all links, at another rate."""
        if host is None:
            return replace(self, rate=rate, rates=(rate,) * len(self.rates))
        self.check_host(host)
        return replace(self, rates=(*self.rates[:host], rate, *self.rates[host + 1 :]))

    def check_host(self, host: int) -> None:
        """Refuse a host that is not there."""
        if not 0 <= host < len(self.rates):
            raise LabError(f"there is no host {host}: hosts are 0 to {len(self.rates) - 1}")


def address(host: int) -> str:
    """A host's address."""
    return f"{_NETWORK}.{host + 1}"


def switch_address(rack: int) -> str:
    """A switch's own address, from which a single link can be measured."""
    return f"{_NETWORK}.{254 - rack}"


def build(plan: Plan) -> Iterator[Command]:
    """The commands that make a lab."""
    for rack in range(plan.racks):
        yield from _switch(plan.rack(rack), switch_address(rack))
    for host in range(len(plan.rates)):
        yield from _host(
            plan.host(host), address(host), plan.rack(plan.rack_of(host)), f"port{host}"
        )
    if plan.racks > 1:
        yield from _trunk(plan.rack(0), plan.rack(1))
    yield from shape(plan)


def shape(plan: Plan) -> Iterator[Command]:
    """The commands that hold every link to its rate, both ways; the links may be in use."""
    for host, rate in enumerate(plan.rates):
        if rate is not None:
            yield _limit(plan.host(host), INTERFACE, rate)
            yield _limit(plan.rack(plan.rack_of(host)), f"port{host}", rate)
    if plan.trunk is not None:
        for rack in range(plan.racks):
            yield _limit(plan.rack(rack), "trunk", plan.trunk)


def remove(namespace: str) -> Command:
    """The command that removes a namespace with all that is in it."""
    return ["ip", "netns", "delete", namespace]


def _switch(rack: str, own: str) -> Iterator[Command]:
    yield ["ip", "netns", "add", rack]
    yield ["ip", "-n", rack, "link", "add", "switch", "type", "bridge"]
    yield from _join(rack, "switch", own)


def _host(host: str, own: str, rack: str, port: str) -> Iterator[Command]:
    peer = ["peer", "name", INTERFACE, "netns", host]
    yield ["ip", "netns", "add", host]
    yield ["ip", "-n", rack, "link", "add", port, "type", "veth", *peer]
    yield ["ip", "-n", rack, "link", "set", port, "master", "switch", "up"]
    yield ["ip", "-n", host, "link", "set", "lo", "up"]
    yield from _join(host, INTERFACE, own)


def _join(namespace: str, interface: str, own: str) -> Iterator[Command]:
    ip = ["ip", "-n", namespace]
    yield [*ip, "address", "add", f"{own}/24", "dev", interface, "noprefixroute"]
    yield [*ip, "link", "set", interface, "up"]
    # TCP as on most machines, whatever this one prefers, so that results can be compared.
    yield [*ip, "route", "add", f"{_NETWORK}.0/24", "dev", interface, "congctl", "cubic"]


def _trunk(first: str, second: str) -> Iterator[Command]:
    peer = ["peer", "name", "trunk", "netns", second]
    yield ["ip", "-n", first, "link", "add", "trunk", "type", "veth", *peer]
    for rack in (first, second):
        yield ["ip", "-n", rack, "link", "set", "trunk", "master", "switch", "up"]


def _limit(namespace: str, interface: str, rate: int) -> Command:
    burst, limit = bucket(rate)
    filter_ = ["tbf", "rate", show_rate(rate), "burst", str(burst), "limit", str(limit)]
    return ["tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *filter_]
