"""The commands that make a lab, without running any."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from sparsewire.tools.lab import LabError
from sparsewire.tools.lab.plan import Plan, build, shape

ID = "c0ffee00"
MBIT = 10**6


def test_commands_stay_in_their_own_namespaces() -> None:
    plan = Plan(ID, (MBIT,) * 4, MBIT, oversubscribe=2)
    for command in build(plan):
        assert command[0] in ("ip", "tc")
        place = command[3] if command[1] == "netns" else command[2]
        assert place in plan.namespaces
        assert command[1] == "-n" or command[1:3] == ["netns", "add"]


def test_the_page_shows_the_commands() -> None:
    page = Path(__file__).parents[3] / "docs" / "lab.md"
    shown = page.read_text().split("```bash\nip netns add", 1)[1].split("```", 1)[0]
    commands = [shlex.join(command) for command in build(Plan(ID, (10**9,) * 2, 10**9))]
    assert f"ip netns add{shown}".splitlines() == commands


def test_every_link_is_shaped_both_ways() -> None:
    plan = Plan(ID, (10 * MBIT, None, 30 * MBIT))
    shaped = [(command[2], command[6], command[10]) for command in shape(plan)]
    assert shaped == [
        (plan.host(0), "eth0", "10mbit"),
        (plan.rack(0), "port0", "10mbit"),
        (plan.host(2), "eth0", "30mbit"),
        (plan.rack(0), "port2", "30mbit"),
    ]


def test_racks() -> None:
    plan = Plan(ID, (100 * MBIT,) * 6, 100 * MBIT, oversubscribe=4)
    assert [plan.rack_of(host) for host in range(6)] == [0, 0, 0, 1, 1, 1]
    assert plan.trunk == 75 * MBIT
    assert plan.with_rate(10 * MBIT).trunk == 7.5 * MBIT
    assert plan.with_rate(10 * MBIT, host=1).trunk == 75 * MBIT
    assert Plan(ID, (MBIT,) * 6, MBIT).trunk is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ((ID, ()), "a lab has 1 to 200 hosts, not 0"),
        ((ID, (None,) * 201), "a lab has 1 to 200 hosts, not 201"),
        ((ID, (None, None), None, 2), "oversubscribe needs a rate and at least two hosts"),
        ((ID, (MBIT,), MBIT, 2), "oversubscribe needs a rate and at least two hosts"),
        ((ID, (MBIT, MBIT), MBIT, 0.5), "oversubscribe must lie in 1 to 1000, not 0.5"),
        ((ID, (MBIT, MBIT), MBIT, float("nan")), "oversubscribe must lie"),
        (("../../etc", (None,)), "is no lab's id"),
        (("c0ffee00\n", (None,)), "is no lab's id"),
    ],
)
def test_what_is_no_plan(fields: tuple[object, ...], said: str) -> None:
    with pytest.raises(LabError, match=said):
        Plan(*fields)  # type: ignore[arg-type]


def test_hosts_that_are_not_there() -> None:
    with pytest.raises(LabError, match="there is no host 2: hosts are 0 to 1"):
        Plan(ID, (None, None)).with_rate(MBIT, host=2)
