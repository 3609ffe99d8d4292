"""A network between simulated processes: messages take their time, and some go wrong."""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsewire.groups.transport import wait_in_slices

from .world import Process, Signal, Violation, World


@dataclass
class MessageFault:
    """One message, or those of one rank to all others, that do not arrive as they were sent.

    Arguments:
        number: of the collective, as ranks begin them.
        kind: 'flip', 'scramble', 'swap', 'drop' or 'repeat'.
        at_all: at all other ranks of the group, or at one of them.
    """

    number: int
    kind: str
    at_all: bool
    sender: int = -1  # filled in when it happens, by the number in the world
    happened_at: float | None = None

    @property
    def changes_order(self) -> bool:
        return self.kind in ("drop", "repeat")


@dataclass
class Line:
    """A connection in one direction: what has arrived, and when the last of it will have."""

    inbox: deque[tuple[str, Tensor]] = field(default_factory=deque)
    busy_until: float = 0.0


class SimulatedWork:
    """A collective under way on one rank."""

    def __init__(self, transport: SimulatedTransport, kind: str, output: Tensor) -> None:
        self.kind = kind
        self.output = output
        self.awaited: set[int] = set()  # places of the ranks whose message is to come
        self.has_departed = False
        self.error: str | None = None
        self._transport = transport
        self._ended = Signal(transport.world)

    def is_completed(self) -> bool:
        return self.error is not None or (self.has_departed and not self.awaited)

    def end(self) -> None:
        """Tell those who wait, if it has ended."""
        if self.is_completed():
            self._ended.happen()

    def fail(self, error: str) -> None:
        if not self.is_completed():
            self.error = error
            self.end()

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        task = self._transport.world.current
        task.is_inside = "the backend" if timeout is None else None
        if not self.is_completed():
            seconds = None if timeout is None else timeout.total_seconds()
            self._transport.world.wait(self._ended, seconds)
        task.is_inside = None
        if self.error is not None:
            raise RuntimeError(self.error)
        if not self.is_completed():
            raise RuntimeError("the wait timed out")


class Network:
    """The links between processes, and what goes wrong on them.

    Arguments:
        world: whose processes talk, by their place in `processes`.
        timeout: seconds after which a backend ends a collective by itself; None if it never does.
    """

    def __init__(self, world: World, processes: Sequence[Process], timeout: float | None) -> None:
        self.world = world
        self.processes = processes
        self.timeout = timeout
        self.fault: MessageFault | None = None
        self.begun = 0  # collectives, on all ranks together
        self.transports: dict[tuple[str, Process], SimulatedTransport] = {}
        self.last_of_shape: dict[tuple[str, torch.Size], tuple[Process, Tensor]] = {}
        self._lines: dict[tuple[str, Process, Process], Line] = {}
        self._cut_until: dict[tuple[Process, Process], float] = {}
        self.on_begin: Callable[[Process], None] = lambda process: None
        for process in processes:
            process.on_end.append(lambda process=process: self._reset(process))  # type: ignore[misc]

    def line(self, group: str, source: Process, target: Process) -> Line:
        """The connection in one direction that a group has between two processes."""
        key = group, source, target
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line()
        return line

    def cut(self, source: Process, target: Process, seconds: float) -> None:
        """Let nothing pass from one process to another for so long; what is sent waits."""
        self._cut_until[source, target] = self.world.now + seconds
        if seconds < float("inf"):
            self.world.at(self.world.now + seconds, self.world.changed.happen)

    def is_cut(self, source: Process, target: Process) -> bool:
        return self._cut_until.get((source, target), 0.0) > self.world.now

    def delay(self) -> float:
        chance = self.world.chance
        return chance.uniform(0.1, 0.8) if chance.random() < 0.02 else chance.uniform(2e-4, 2e-3)

    def send(
        self, source: Process, target: Process, last: float, arrive: Callable[[], None]
    ) -> float:
        """Let something arrive, after all that was sent before; returns when, if nothing is cut."""
        moment = max(last, self.world.now + self.delay())

        def deliver() -> None:
            until = self._cut_until.get((source, target), 0.0)
            if until > self.world.now:
                if until < float("inf"):
                    self.world.at(until, deliver)
            elif not target.is_dead:
                arrive()

        self.world.at(moment, deliver)
        return moment

    def _reset(self, process: Process) -> None:
        """Close the connections of a process that has ended. Some peers notice that."""
        for transport in self.transports.values():
            if process in transport.processes and transport.process is not process:
                place = transport.processes.index(process)
                if self.world.chance.random() < 0.7:
                    moment = self.world.now + self.world.chance.uniform(0.01, 0.3)
                    transport.lose(place, moment)


class SimulatedTransport:
    """Carries the messages of one rank of a group; the other ranks have theirs.

    Arguments:
        network: over which they go.
        process: of this rank.
        processes: of all ranks of the group, in their order.
        name: of the group.
    """

    def __init__(
        self, network: Network, process: Process, processes: Sequence[Process], name: str
    ) -> None:
        self.world = network.world
        self.process = process
        self.processes = list(processes)
        self.name = name
        self._network = network
        self._place = self.processes.index(process)
        size = len(self.processes)
        self._works: list[deque[SimulatedWork]] = [deque() for _ in range(size)]  # by sender
        self._lines = [network.line(name, source, process) for source in self.processes]
        self._lost: set[int] = set()
        network.transports[name, process] = self

    # -- what a connection calls -----------------------------------------------------------------

    def gather(self, output: Tensor, payload: Tensor) -> SimulatedWork:
        rows = output.view(len(self.processes), -1)
        return self._begin("gather", [payload] * len(self.processes), rows, range(len(rows)))

    def deliver(self, output: Tensor, rows: Tensor) -> SimulatedWork:
        return self._begin("deliver", list(rows), output, range(len(rows)))

    def show(self, payload: Tensor, root: int) -> SimulatedWork:
        payloads = [payload] * len(self.processes) if root == self._place else []
        return self._begin(f"show {root}", payloads, payload.view(1, -1), [root])

    def wait(self, work: SimulatedWork, is_given_up: Callable[[], bool]) -> bool:
        return wait_in_slices(work, is_given_up)

    # -- how it gets there -----------------------------------------------------------------------

    def _begin(
        self, kind: str, payloads: Sequence[Tensor], output: Tensor, senders: Sequence[int]
    ) -> SimulatedWork:
        network = self._network
        network.on_begin(self.process)
        work = SimulatedWork(self, kind, output)
        work.awaited = {place for place in senders if place != self._place}
        if kind == "gather" or kind == "deliver":
            output[self._place] = payloads[self._place]
        for place in work.awaited:
            self._works[place].append(work)
        number = network.begun
        network.begun += 1
        if network.timeout is not None:
            late = (
                f"Timed out waiting {network.timeout * 1000:.0f}ms for recv operation to complete"
            )
            moment = self.world.now + network.timeout
            self.world.at(moment, lambda: self.process.run_soon(lambda: work.fail(late)))
        moment = self.world.now + self.world.chance.uniform(0, 5e-4)
        depart = lambda: self._depart(work, number, payloads)  # noqa: E731
        self.world.at(moment, lambda: self.process.run_soon(depart))
        for place in self._lost & work.awaited:
            self._fail(work, place)
        for place in list(work.awaited):
            self._match(place)
        self.world.pause()
        return work

    def _depart(self, work: SimulatedWork, number: int, payloads: Sequence[Tensor]) -> None:
        """Send what the payloads hold now: the sender may write to them when its work has ended."""
        fault, chance = self._network.fault, self.world.chance
        others = [place for place in range(len(payloads)) if place != self._place]
        hit: Sequence[int] = ()
        is_next = fault is not None and fault.happened_at is None and fault.number <= number
        if is_next and any(payloads[place].numel() for place in others):
            assert fault is not None
            fault.sender = self._network.processes.index(self.process)
            fault.happened_at = self.world.now
            hit = others if fault.at_all else [chance.choice(others)]
        copies: dict[int, Tensor] = {}
        for place in others:
            payload = payloads[place]
            if id(payload) not in copies:
                copies[id(payload)] = payload.clone()
            data = copies[id(payload)]
            times = 1
            if place in hit:
                assert fault is not None
                times = {"drop": 0, "repeat": 2}.get(fault.kind, 1)
                if not fault.changes_order:
                    data = self._damaged(data.clone(), fault.kind)
            for _ in range(times):
                self._send(place, work.kind, data)
        work.has_departed = True
        work.end()

    def _damaged(self, data: Tensor, kind: str) -> Tensor:
        chance = self.world.chance
        if kind == "swap":  # another rank's message of the same size; zeros, if there is none
            sender, other = self._network.last_of_shape.get(
                (self.name, data.shape), (self.process, data)
            )
            return torch.zeros_like(data) if sender is self.process else other
        part = chance.choice((data, data[:1], data[-64:]))
        if kind == "flip":
            part[chance.randrange(part.numel())] ^= 1 << chance.randrange(8)
        else:
            text = chance.randbytes(part.numel())
            part.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        return data

    def _send(self, place: int, kind: str, data: Tensor) -> None:
        network, target = self._network, self.processes[place]
        line = network.line(self.name, self.process, target)
        network.last_of_shape[self.name, data.shape] = self.process, data

        def arrive() -> None:
            line.inbox.append((kind, data))
            peer = network.transports.get((self.name, target))
            if peer is not None:  # else it is still to come
                peer._match(self._place)

        line.busy_until = network.send(self.process, target, line.busy_until, arrive)

    def _match(self, place: int) -> None:
        """Give the messages of a rank to the collectives that wait for one."""
        works, inbox = self._works[place], self._lines[place].inbox
        while works and inbox:
            work, (kind, data) = works.popleft(), inbox.popleft()
            row = work.output[0] if work.kind.startswith("show") else work.output[place]
            if kind != work.kind or row.shape != data.shape:
                fault = self._network.fault
                if fault is None or not fault.changes_order:
                    raise Violation(
                        f"{self.process.name} began {work.kind} of {row.numel()} bytes in "
                        f"{self.name}, and got {kind} of {data.numel()} from rank {place}"
                    )
                work.fail(f"a message of {data.numel()} bytes where {row.numel()} were expected")
                continue
            if work.error is None:
                row.copy_(data)
            work.awaited.discard(place)
            work.end()

    def lose(self, place: int, moment: float) -> None:
        """Notice that a rank's connection is closed, after all that it has sent."""

        def notice() -> None:
            self._lost.add(place)
            for work in list(self._works[place]):
                self._fail(work, place)

        moment = max(moment, self._lines[place].busy_until)
        self.world.at(moment, lambda: self.process.run_soon(notice))

    def _fail(self, work: SimulatedWork, place: int) -> None:
        work.fail(f"Connection closed by peer [127.0.0.1]:{9000 + place}")
