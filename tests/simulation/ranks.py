"""The programs that ranks run: they attach, train for a few steps, and note what they saw.

Everything but transport, store, clock and threads is the library's own: connections, exchange
threads, watches, sessions and adapters. Gradients are whole numbers, whose sums are exact.
"""

from __future__ import annotations

import random
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

import sparsewire as sw
from sparsewire import functional
from sparsewire.adapters.audit import Audit
from sparsewire.adapters.base import Meeting
from sparsewire.adapters.ddp import _leave_out_dropped_steps
from sparsewire.adapters.pipeline import Pipeline
from sparsewire.adapters.rounds import Rounds
from sparsewire.adapters.scaling import Scaling
from sparsewire.adapters.updates import Updates
from sparsewire.counters import Counters
from sparsewire.groups import drive
from sparsewire.groups.connection import Connection
from sparsewire.groups.hierarchy import Hierarchy
from sparsewire.groups.liveness import Liveness
from sparsewire.groups.thread import ExchangeThread, Watcher, _running
from sparsewire.scheme import AnyScheme
from sparsewire.segments import ParamSlice
from sparsewire.session import Session, Topology, handshake
from sparsewire.state import OWNED, RESIDUAL

from ..laws.cases import owned_places
from .network import Network, SimulatedTransport
from .store import SimulatedStore
from .world import Process, Signal, Violation, VirtualEnvironment, World

SIZE = 4  # so that a mean of whole numbers is exact
LOCAL = 2  # ranks of a machine
SHAPES = {"weight": (12, 10), "bias": (5,), "other": (9, 8)}
BUCKETS = (("weight", "bias"), ("other",))
STEPS = 4
TIMEOUT = 6.0  # seconds, in virtual time
CPU = torch.device("cpu")


def whole_numbers(shape: tuple[int, ...], *seeds: int) -> Tensor:
    """Small whole numbers as float32."""
    return _whole_numbers(shape, *seeds).clone()


@cache
def _whole_numbers(shape: tuple[int, ...], *seeds: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(s * 1000**n for n, s in enumerate(seeds)))
    return torch.randint(-50, 50, shape, generator=generator).float()


@dataclass(frozen=True)
class Scenario:
    """What ranks do in every step.

    Arguments:
        scheme: what they exchange.
        machines: two machines of two ranks take part as one rank each.
        skips_unused: see `Exchange`.
        every: local steps between two exchanges of updates; None for gradients.
        step_ahead: λ of updates. If it is not 0, sums are not exact.
        delay: 1 if an exchange of updates ends one round later.
        skips: steps with NaN are left out, by a loop that looks at its own loss only.
        functional: gradients are exchanged by `functional.exchange`.
    """

    scheme: str
    machines: bool = False
    skips_unused: bool = False
    every: int | None = None
    step_ahead: Any = 0.0
    delay: int = 0
    skips: bool = False
    functional: bool = False

    @cached_property
    def parsed(self) -> AnyScheme:
        """The scheme, which ranks share: it is frozen."""
        return sw.parse(self.scheme)

    def topology(self, rank: int) -> Topology:
        if self.machines:
            return Topology(rank // LOCAL, SIZE // LOCAL, rank % LOCAL, LOCAL)
        return Topology(rank, SIZE)


class Team:
    """Four processes with a rank each, and one that hosts the store, if rank 0 does not."""

    def __init__(
        self, scenario: Scenario, chance: random.Random, is_hosted_by_rank: bool, ends: bool
    ) -> None:
        self.scenario = scenario
        self.world = World(chance)
        self.processes = [Process(self.world, f"rank {rank}") for rank in range(SIZE)]
        agent = Process(self.world, "the agent")
        self.host = self.processes[0] if is_hosted_by_rank else agent
        everybody = [*self.processes, agent]
        self.network = Network(self.world, everybody, TIMEOUT if ends else None)
        self.notes: dict[str, str] = {}
        kind: type[Program] = GradientProgram if scenario.every is None else UpdateProgram
        if scenario.functional:
            kind = FunctionalProgram
        self.programs = [kind(self, rank) for rank in range(SIZE)]

    def run(self, limit: float) -> None:
        """Let all ranks run to their end, unless they never come to it."""
        mains = [
            process.spawn(program.main, "main")
            for process, program in zip(self.processes, self.programs, strict=True)
        ]

        def is_over() -> bool:
            return all(
                main.is_done or main.process.is_dead or main.process.is_stopped for main in mains
            )

        try:
            self.world.run(is_over, limit)
        finally:
            self.world.close()

    def forget(self) -> None:
        """Let go of everything. torch's futures keep the frames in which an error was raised."""
        for program in self.programs:
            for held in (*vars(program).values(), program):
                if isinstance(held, (Pipeline, Rounds, Updates, Program)):
                    vars(held).clear()
        for watcher in list(_running):  # the interpreter would stop them at exit
            if isinstance(watcher._environment, VirtualEnvironment):
                _running.discard(watcher)
        world = self.world
        for each in (*self.processes, self.network, world, self):
            vars(each).clear()
        world.__init__(random.Random(0))  # type: ignore[misc]  # threads are stopped at exit


class Program(ABC):
    """What one rank's process runs, and what it has seen."""

    def __init__(self, team: Team, rank: int) -> None:
        self.team = team
        self.rank = rank
        self.process = team.processes[rank]
        self.world = team.world
        self.taken: list[list[Tensor]] = []  # what the rank held after each step that it took
        self.kept: list[list[Tensor]] = []  # what it keeps for later steps, likewise
        self.errors: list[tuple[int, BaseException]] = []  # with the steps that failed
        self.waits: list[tuple[float, float, float]] = []  # from, until, of which frozen
        self.given = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.is_through = False  # it has taken all steps
        self._is_attached = False
        self.before: Callable[[Program, int, int], None] = lambda *_: None

    # -- what differs ----------------------------------------------------------------------------

    @abstractmethod
    def begin(self, meeting: Meeting) -> None:
        """Attach, once the ranks have met."""

    @property
    @abstractmethod
    def session(self) -> Session: ...

    @property
    @abstractmethod
    def thread(self) -> Watcher: ...

    def stop(self) -> None:
        """Stop the threads, as the interpreter does at exit."""
        self.thread.stop()

    @abstractmethod
    def error(self) -> BaseException | None:
        """The last failure in full."""

    @abstractmethod
    def step(self, number: int) -> list[Tensor]:
        """Take a step, and return what all ranks should hold then."""

    @abstractmethod
    def close(self) -> None:
        """What is left to do after the last step."""

    @abstractmethod
    def parameters(self) -> dict[str, Tensor]:
        """What all ranks should have in common."""

    @abstractmethod
    def poison(self) -> None:
        """Let the next step have NaN."""

    # -- what all do -----------------------------------------------------------------------------

    def main(self) -> None:
        """The script."""
        try:
            self._train()
        except (UserError, MemoryError, ValueError) as error:  # at attach, nobody translates them
            self.errors.append((len(self.taken), error))
        self._exit()

    def _train(self) -> None:
        try:
            self._timed(self._attach)
        except sw.SparsewireError as error:
            self.errors.append((0, error))
            return
        for number in range(STEPS):
            if not self._take(number):
                return
        self.is_through = True

    def _exit(self) -> None:
        """Leave the process, as the interpreter does."""
        if self._is_attached:
            self.stop()
        for task in self.process.tasks:
            if task.is_inside is not None:
                raise Violation(
                    f"{task} is inside {task.is_inside} when the process exits: it aborts"
                )
        self.world.at(self.world.now, self.process.kill)

    def _take(self, number: int) -> bool:
        """Take a step, if need be at a second try; returns whether it was taken."""
        for attempt in range(2):
            self.world.sleep(self.world.chance.uniform(0, 0.05))
            self.before(self, number, attempt)
            try:
                held = self._timed(lambda: self.step(number))
            except RuntimeError as raised:
                self.errors.append((number, self.error() or raised))
                if self.thread.broken is not None or _breaks(self.errors[-1][1]):
                    self._check_that_it_is_over(number)
                    return False
            else:
                self.taken.append(held)
                self.kept.append(self.held())
                return True
        return False

    def _check_that_it_is_over(self, number: int) -> None:
        """A group that is broken refuses every later step, at once."""
        began = self.world.now
        try:
            self.step(number)
        except RuntimeError:
            if self.world.now - began > 1.0 and not self.process.frozen_for:
                raise Violation("a broken group lets a rank wait") from None
            return
        raise Violation("a broken group took another step")

    def _timed(self, action: Callable[[], Any]) -> Any:
        began, frozen = self.world.now, self.process.frozen_for
        try:
            return action()
        finally:
            if not self.process.is_dead:
                self.waits.append((began, self.world.now, self.process.frozen_for - frozen))

    def _attach(self) -> None:
        team, topology = self.team, self.team.scenario.topology(self.rank)
        liveness = Liveness(self.rank, SIZE, TIMEOUT, VirtualEnvironment(self.process))
        everyone = self._connect(range(SIZE), "everyone", liveness)
        store = SimulatedStore(team.network, self.process, team.host, team.notes)
        everyone.limited(lambda: everyone._arrive(store, []))
        scheme = team.scenario.parsed
        parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        drive(handshake(self.rank, scheme, parameters), everyone, Counters())
        hierarchy = None
        if team.scenario.machines:
            first = self.rank // LOCAL * LOCAL
            inside = self._connect(range(first, first + LOCAL), f"machine {first}", liveness)
            leaders = None
            if topology.leads:
                leaders = self._connect(range(0, SIZE, LOCAL), "leaders", liveness)
            place = topology.rank, topology.world_size
            hierarchy = Hierarchy(*place, inside, leaders, everyone)
        self.begin(Meeting(everyone, hierarchy, topology))
        self._is_attached = True

    def _connect(self, ranks: Sequence[int], name: str, liveness: Liveness) -> Connection:
        processes = [self.team.processes[rank] for rank in ranks]
        transport = SimulatedTransport(self.team.network, self.process, processes, name)
        return Connection(ranks.index(self.rank), len(ranks), liveness, CPU, transport)

    def new_session(self) -> Session:
        scenario = self.team.scenario
        return Session(
            scenario.parsed,
            SHAPES,
            scenario.topology(self.rank),
            skips_unused=scenario.skips_unused,
        )

    def give(self, gradients: dict[str, Tensor]) -> None:
        """Note what counts as accumulated."""
        for name, gradient in gradients.items():
            self.given[name] += gradient

    def memory(self) -> Mapping[str, Mapping[str, Tensor]]:
        """What this rank keeps of each parameter."""
        return self.session.store.state_dict()

    def held(self) -> list[Tensor]:
        """All that this rank keeps for later steps."""
        kept = self.memory().values()
        state = [tensor.clone() for fields in kept for tensor in fields.values()]
        return [*state, *(value.clone() for value in self.parameters().values())]


def _breaks(error: BaseException) -> bool:
    return isinstance(error, sw.errors.ExchangeError) and not error.is_agreed


class UserError(Exception):
    """A mistake in the script of one rank."""


class _Bucket:
    """What DDP hands to a communication hook."""

    def __init__(
        self, index: int, names: Sequence[str], parameters: dict[str, nn.Parameter]
    ) -> None:
        self._index = index
        self._parameters = [parameters[name] for name in names]
        self._buffer = torch.zeros(sum(p.numel() for p in self._parameters))

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._index == len(BUCKETS) - 1

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def views(self) -> list[Tensor]:
        parts = torch.split(self._buffer, [p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]


def gradients_of(scenario: Scenario, rank: int, step: int) -> dict[str, Tensor]:
    """What a rank adds in a step."""
    return {name: each.clone() for name, each in _gradients_of(scenario, rank, step).items()}


@cache
def _gradients_of(scenario: Scenario, rank: int, step: int) -> dict[str, Tensor]:
    gradients = {}
    for n, (name, shape) in enumerate(SHAPES.items()):
        seeds = [(rank, step, n, local) for local in range(scenario.every or 1)]
        gradients[name] = sum((whole_numbers(shape, *each) for each in seeds), torch.zeros(shape))
    if scenario.skips_unused and step % 2:
        gradients["other"].zero_()
    return gradients


def start_weights() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(whole_numbers(shape, 99)) for name, shape in SHAPES.items()}


class GradientProgram(Program):
    """Exchanges gradients in two buckets, and takes steps of SGD with a learning rate of 1."""

    def begin(self, meeting: Meeting) -> None:
        self._parameters = start_weights()
        self._is_bad = False
        self._pipeline = Pipeline(
            self.new_session(),
            meeting,
            self._parameters,
            Scaling(self._parameters, None, None),
            "skip" if self.team.scenario.skips else "raise",
            Audit(2),
        )
        self._optimizer = torch.optim.SGD(self._parameters.values(), lr=1.0)
        self._optimizer.register_step_pre_hook(_leave_out_dropped_steps(self._pipeline))

    @property
    def session(self) -> Session:
        return self._pipeline.session

    @property
    def thread(self) -> ExchangeThread:
        return self._pipeline.thread

    def error(self) -> BaseException | None:
        return self._pipeline.error

    def poison(self) -> None:
        self._is_bad = True

    def step(self, number: int) -> list[Tensor]:
        gradients = gradients_of(self.team.scenario, self.rank, number)
        is_bad, self._is_bad = self._is_bad, False
        if is_bad:
            gradients["other"][3, 3] = float("nan")
        buckets = [_Bucket(n, names, self._parameters) for n, names in enumerate(BUCKETS)]
        futures = []
        for bucket, names in zip(buckets, BUCKETS, strict=True):
            for view, name in zip(bucket.views(), names, strict=True):
                view.copy_(gradients[name])
            futures.append(self._pipeline.take(bucket))  # type: ignore[arg-type]
        for future in futures:
            self._wait_for(future)
        for future in futures:
            future.value()
        means = [view for bucket in buckets for view in bucket.views()]
        if not self._pipeline.dropped:
            self.give(gradients)
        for parameter, mean in zip(self._parameters.values(), means, strict=True):
            parameter.grad = mean.clone()
        if not is_bad:
            self._optimizer.step()
        return [*means, *(parameter.data.clone() for parameter in self._parameters.values())]

    def _wait_for(self, future: torch.futures.Future[Tensor]) -> None:
        done = Signal(self.world)
        known = weakref.ref(done)  # a callback that is never called would keep all alive
        future.add_done_callback(lambda _: _happen(known))
        if not future.done():
            self.world.wait(done)

    def close(self) -> None:
        pass

    def parameters(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self._parameters.items()}


def _happen(known: weakref.ref[Signal]) -> None:
    done = known()
    if done is not None:
        done.happen()


class UpdateProgram(Program):
    """Exchanges updates of SGD with a learning rate of 1, and a buffer."""

    def begin(self, meeting: Meeting) -> None:
        scenario = self.team.scenario
        self._parameters = start_weights()
        self._buffer = torch.zeros(3)
        self._updates = Updates(
            self.new_session(),
            self._parameters,
            step_ahead=scenario.step_ahead,
            buffers=[self._buffer],
            is_delayed=bool(scenario.delay),
            audit=Audit(2),
        )
        self._rounds = Rounds(self._updates, meeting, scenario.delay, "raise")

    @property
    def session(self) -> Session:
        return self._updates.session

    @property
    def thread(self) -> ExchangeThread:
        assert self._rounds.thread is not None
        return self._rounds.thread

    def error(self) -> BaseException | None:
        return self._rounds.error

    def poison(self) -> None:
        self._updates.bad = "other"

    def step(self, number: int) -> list[Tensor]:
        self._buffer.fill_(10 * number + self.rank)
        gradients = gradients_of(self.team.scenario, self.rank, number)
        for name, gradient in gradients.items():
            self._parameters[name].data -= gradient
        try:
            self._rounds.end()
        except sw.errors.CorruptMessageError:
            if not self.team.scenario.delay:
                self.give(gradients)  # deferred
            raise
        self.give(gradients)
        if number == STEPS - 1:
            self.close()
        ahead = torch.tensor(self._updates.ahead)
        buffer = self._buffer.clone() if not self.team.scenario.delay else torch.zeros(3)
        return [self._updates.weights.shared.clone(), buffer, ahead]

    def close(self) -> None:
        self._rounds.finish()

    def parameters(self) -> dict[str, Tensor]:
        weights = self._updates.weights
        return weights.values(weights.shared)


class FunctionalProgram(Program):
    """A loop of its own around `functional.exchange`; nothing compares its weights."""

    def begin(self, meeting: Meeting) -> None:
        assert isinstance(meeting.group, Connection)
        self._parameters = {name: p.data for name, p in start_weights().items()}
        self._group = meeting.group
        self._state = functional.init(self.team.scenario.parsed, self._parameters)
        self._is_bad = False
        self._error: BaseException | None = None

    @property
    def session(self) -> Session:
        raise AssertionError("every exchange has its own")

    @property
    def thread(self) -> Watcher:
        return functional._watchers[self._group]

    def stop(self) -> None:
        if self._group in functional._watchers:
            super().stop()

    def error(self) -> BaseException | None:
        return self._error

    def poison(self) -> None:
        self._is_bad = True

    def step(self, number: int) -> list[Tensor]:
        gradients = gradients_of(self.team.scenario, self.rank, number)
        sent = dict(gradients)
        if self._is_bad:
            sent["other"] = torch.full_like(sent["other"], float("nan"))
            self._is_bad = False
        try:
            means, self._state = functional.exchange(sent, self._state, self._group)
        except sw.SparsewireError as error:
            self._error = error
            raise
        self.give(gradients)
        for name, mean in means.items():
            self._parameters[name] -= mean
        return list(means.values())

    def close(self) -> None:
        pass

    def parameters(self) -> dict[str, Tensor]:
        return self._parameters

    def memory(self) -> Mapping[str, Mapping[str, Tensor]]:
        return self._state.memory


def owed(programs: Sequence[Program]) -> dict[str, Tensor]:
    """What all ranks have not sent yet."""
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for program in programs:
        place, memory = program.team.scenario.topology(program.rank), program.memory()
        for name, sums in total.items() if place.leads else ():
            kept = memory[name]
            sums += kept.get(RESIDUAL, torch.zeros(SHAPES[name])).double()
            if OWNED in kept:
                param = ParamSlice(name, SHAPES[name], 0)
                at = torch.tensor(owned_places(param, place.rank, place.world_size))
                sums.view(-1)[at.long()] += place.world_size * kept[OWNED].double()
    return total


def is_in_balance(programs: Sequence[Program]) -> bool:
    """Whether accumulated = applied + residual, for ranks that have all taken every step."""
    start, now, rest = start_weights(), programs[0].parameters(), owed(programs)
    place = programs[0].team.scenario.topology(0)
    for name in SHAPES:
        given = torch.stack([program.given[name] for program in programs]).double().sum(0)
        applied = (start[name].data - now[name]).double()
        if not torch.equal(given / place.local_world_size, applied * place.world_size + rest[name]):
            return False
    return True
