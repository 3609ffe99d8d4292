"""One schedule: a few steps in which, as a seed decides, something goes wrong; and what must hold.

1. All ranks hold the same bits, those of a run in which nothing went wrong, or all have raised.
2. An error that all ranks raise alike has changed nothing, and the step can be repeated.
3. Any other error breaks the group: no rank takes another step, and all that live say so.
4. Accumulated = applied + residual, exactly.
5. An error names the rank that caused it.
6. Nobody waits beyond the deadline.
7. No process ends while one of its threads is inside the backend, and no thread dies.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.groups.liveness import GRACE, LIMIT
from sparsewire.groups.thread import POLL
from sparsewire.segments import Segments, Shape

from .network import MessageFault
from .ranks import LOCAL, SIZE, STEPS, TIMEOUT, Program, Scenario, Team, UserError, is_in_balance
from .world import Process, Violation

DEADLINE = TIMEOUT + GRACE  # of one exchange
REACTION = POLL + LIMIT + 2.0  # until a rank that knows of a failure has asked the others
LONG = 4 * DEADLINE
Same = Callable[[Sequence[Tensor], Sequence[Tensor]], bool]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Let the library log nothing: its errors are looked at."""
    logger = logging.getLogger("sparsewire")
    before = logger.level
    if before == logging.CRITICAL:  # as `many` left it: to set a level takes time
        yield
        return
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def many() -> Iterator[None]:
    """Play many schedules inside: nothing is done again for each that is the same for all.

    Tensors are small, so torch's threads would only get in each other's way; nobody profiles; what
    is there before is not looked through for garbage; and ranks share partitions, which are frozen.
    """
    threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    gc.collect()
    gc.freeze()
    with _silence(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.profiler, "record_function", contextlib.nullcontext)
        patch.setattr(sw.Scheme, "partition", _partition)
        torch.set_num_threads(1)
        gc.set_threshold(20_000, 10, 10)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            gc.set_threshold(*thresholds)
            gc.unfreeze()


def _partition(scheme: sw.Scheme, shapes: Mapping[str, Shape]) -> Segments:
    return _cached_partition(scheme, tuple((name, tuple(each)) for name, each in shapes.items()))


_plain_partition = sw.Scheme.partition


@cache
def _cached_partition(scheme: sw.Scheme, shapes: tuple[tuple[str, Shape], ...]) -> Segments:
    return _plain_partition(scheme, dict(shapes))


class Unknown(sw.errors.ExchangeError):
    """An error of a kind that sparsewire does not know."""


@dataclass
class Twin:
    """A run in which nothing goes wrong."""

    taken: list[list[Tensor]]  # what all ranks hold after each step
    kept: list[list[list[Tensor]]]  # what each rank keeps for later steps
    turns: list[int]  # of each process
    begun: int  # collectives
    seconds: float


@cache
def undisturbed(scenario: Scenario) -> Twin:
    team = Team(scenario, random.Random(0), is_hosted_by_rank=False, ends=True)
    with torch.no_grad():
        team.run(1000.0)
        programs = team.programs
        assert all(len(program.taken) == STEPS for program in programs)
        assert scenario.step_ahead or is_in_balance(programs)
    turns = [process.turns for process in team.processes]
    kept = [program.kept for program in programs]
    return Twin(programs[0].taken, kept, turns, team.network.begun, team.world.now)


@dataclass
class Fault:
    """Something that goes wrong, once.

    Arguments:
        kind: what.
        rank: whose process; SIZE is the agent, which hosts the store unless rank 0 does.
        turn: how often that process has had a turn before.
        seconds: how long it lasts; None for ever.
        other: the second rank of a link.
    """

    kind: str
    rank: int = -1
    turn: int = -1
    step: int = -1
    seconds: float | None = None
    other: int = -1
    message: MessageFault | None = None
    happened_at: float | None = None

    @property
    def has_happened(self) -> bool:
        if self.message is not None:
            return self.message.happened_at is not None
        return self.happened_at is not None

    @property
    def ends_at(self) -> float:
        """When the network and the processes are as before."""
        moment = self.happened_at or 0.0
        return moment + (self.seconds or 0.0)

    def __str__(self) -> str:
        parts = [self.kind]
        if self.message is not None:
            where = "all" if self.message.at_all else "one"
            parts.append(f"message {self.message.number} of rank {self.message.sender} at {where}")
        if self.rank >= 0:
            parts.append(f"rank {self.rank}")
        if self.other >= 0:
            parts.append(f"to rank {self.other}")
        if self.turn >= 0:
            parts.append(f"at turn {self.turn}")
        if self.step >= 0:
            parts.append(f"in step {self.step}")
        if self.kind in ("freeze", "cut", "slow"):
            parts.append("for ever" if self.seconds is None else f"for {self.seconds:.1f} s")
        moment = self.happened_at if self.message is None else self.message.happened_at
        parts.append("did not happen" if moment is None else f"happened at {moment:.2f} s")
        return ", ".join(parts)


MESSAGES = ("flip", "scramble", "swap", "drop", "repeat")
KINDS = (
    *MESSAGES,
    *MESSAGES,
    "kill",
    "kill",
    "freeze",
    "freeze",
    "cut",
    "raise",
    "interrupt",
    "exit",
    "slow",
    "bad",
    "late",
    "drift",
    "nothing",
)


@dataclass
class Schedule:
    """What a seed decides for one scenario, if need be among these kinds of faults alone."""

    scenario: Scenario
    seed: int
    kinds: Sequence[str] = KINDS
    story: str = ""

    def __post_init__(self) -> None:
        self.chance = random.Random(f"{self.scenario} {self.seed}")
        chance = self.chance
        is_hosted_by_rank = chance.random() < 0.4
        self.team = Team(self.scenario, chance, is_hosted_by_rank, chance.random() < 0.7)
        self.twin = undisturbed(self.scenario)
        number = 2 if chance.random() < 0.15 else 1
        self.faults = [self._fault(chance.choice(self.kinds)) for _ in range(number)]
        if number == 2 and self._is_too_much():
            del self.faults[1]

    def _is_too_much(self) -> bool:
        """Whether two faults cannot be told apart, or cannot happen together."""
        one, two = self.faults
        return one.kind == two.kind or (one.message is not None and two.message is not None)

    def _fault(self, kind: str) -> Fault:
        chance, twin = self.chance, self.twin
        rank = chance.randrange(SIZE)
        turn = chance.randrange(twin.turns[rank])
        step = chance.randrange(STEPS)
        if kind in MESSAGES:
            number = chance.randrange(twin.begun)
            return Fault(kind, message=MessageFault(number, kind, chance.random() < 0.5))
        if kind in ("kill", "freeze") and chance.random() < 0.2:
            rank = SIZE  # the agent has no turns: somebody else's count
        if kind == "kill":
            return Fault(kind, rank, turn)
        if kind == "freeze":
            return Fault(kind, rank, turn, seconds=chance.choice((1.0, TIMEOUT + 2, LONG, None)))
        if kind == "cut":
            other = chance.choice([each for each in range(SIZE + 1) if each != rank])
            ends = (1.0, TIMEOUT + 2, LONG, None)
            pair = (rank, other) if chance.random() < 0.5 else (other, rank)
            return Fault(kind, pair[0], turn, seconds=chance.choice(ends), other=pair[1])
        if kind == "slow":
            return Fault(kind, rank, step=step, seconds=chance.choice((1.0, TIMEOUT + 2, LONG)))
        if kind in ("exit", "bad", "late", "drift"):
            if self.scenario.functional and kind in ("late", "drift"):
                return Fault("nothing")
            if self.scenario.delay and kind in ("bad", "late"):
                return Fault("nothing")  # the update is lost, which the twin does not know
            if kind == "drift":
                step = 1  # before the audit
            return Fault(kind, rank, step=step)
        if kind in ("raise", "interrupt"):
            return Fault(kind, rank, turn)
        return Fault("nothing")

    # -- what happens ----------------------------------------------------------------------------

    def play(self) -> None:
        """Play all steps; whatever must not happen raises a `Violation` that tells the story."""
        try:
            with torch.no_grad(), _silence():
                self._play()
        except Exception as error:
            raise Violation(f"{error!r}\n{self._tell()}") from error
        finally:
            self.story = self._tell()
            self.team.forget()

    def _tell(self) -> str:
        """The story so far."""
        team = self.team
        lines = [f"{self.scenario}, seed {self.seed}", *map(str, self.faults)]
        lines.append(f"the store is hosted by {team.host.name}; it is {team.world.now:.2f} s")
        for program in team.programs:
            lines.append(f"{program.process.name} took {len(program.taken)} steps")
            lines += [f"  step {step}: {error!r}" for step, error in program.errors]
        return "\n".join(lines)

    def _play(self) -> None:
        team, world = self.team, self.team.world
        world.on_turn = self._on_turn
        team.network.on_begin = self._on_begin
        for fault in self.faults:
            if fault.message is not None:
                team.network.fault = fault.message
        for program in team.programs:
            program.before = self._before
        team.run(1000.0)
        self._judge()

    def _on_turn(self, process: Process) -> None:
        team = self.team
        for fault in self.faults:
            if process.turns <= fault.turn or fault.turn < 0 or fault.has_happened:
                continue
            if process is not team.processes[min(fault.rank, SIZE - 1)]:  # the agent has no turns
                continue
            target = team.network.processes[fault.rank]
            if fault.kind == "kill":
                target.kill()
            elif fault.kind == "freeze":
                target.freeze(fault.seconds)
            elif fault.kind == "cut":
                seconds = float("inf") if fault.seconds is None else fault.seconds
                team.network.cut(target, team.network.processes[fault.other], seconds)
            elif fault.kind == "interrupt":
                process.interrupt()
            else:
                continue
            fault.happened_at = team.world.now

    def _on_begin(self, process: Process) -> None:
        """An exchange may fail on one rank by itself."""
        place = self.team.network.processes.index(process)
        for fault in self.faults:
            is_mine = fault.kind == "raise" and place == fault.rank
            if is_mine and process.turns > fault.turn and not fault.has_happened:
                fault.happened_at = self.team.world.now
                kind = self.chance.choice((Unknown, MemoryError, ValueError))
                raise kind("no room left")

    def _before(self, program: Program, step: int, attempt: int) -> None:
        """What goes wrong in the script of a rank."""
        for fault in self.faults:
            if fault.rank != program.rank:
                continue
            if fault.kind == "late" and fault.has_happened and attempt:
                program.session.steps -= 1
            if fault.has_happened or fault.step != step:
                continue
            if fault.kind == "late":
                program.session.steps += 1
            elif fault.kind == "bad":
                program.poison()
            elif fault.kind == "drift":
                program.parameters()["other"][0, 0] += 1
            elif fault.kind == "slow":
                assert fault.seconds is not None
                program.world.sleep(fault.seconds)
            elif fault.kind == "exit":
                fault.happened_at = program.world.now
                raise UserError("a mistake in the script")
            else:
                continue
            fault.happened_at = program.world.now

    # -- what must hold --------------------------------------------------------------------------

    def _judge(self) -> None:
        programs = self.team.programs
        living = [program for program in programs if not self._is_victim(program)]
        self._judge_steps(programs)
        self._judge_waits(programs)
        for program in living:
            if not program.is_through and not program.errors:
                raise Violation(f"{program.process.name} ended without an error")
        failed = [program for program in living if program.errors]
        if failed and not any(fault.has_happened for fault in self.faults):
            raise Violation("a step failed without a reason")
        broken = [program for program in living if not program.is_through]
        if not broken:
            self._judge_whole(programs)
        elif any(program.is_through and len(program.taken) < STEPS for program in living):
            raise Violation("some ranks went on, and others did not")
        self._judge_errors(living)

    def _is_victim(self, program: Program) -> bool:
        """Whether a rank may end without a word."""
        process = program.process
        was_killed = process.is_dead and not program.is_through and not program.errors
        return (was_killed and self._has(program, "kill")) or process.is_stopped

    def _has(self, program: Program, kind: str) -> bool:
        return any(
            fault.kind == kind and fault.rank == program.rank and fault.has_happened
            for fault in self.faults
        )

    @property
    def _follows_twin(self) -> bool:
        """Whether ranks end as if nothing had happened; not after updates that were sent late."""
        scenario = self.scenario
        is_late = scenario.every is not None and any(fault.message for fault in self.faults)
        is_late |= bool(scenario.step_ahead) and any(p.errors for p in self.team.programs)
        kinds = {fault.kind for fault in self.faults if fault.has_happened}
        return not (is_late or "drift" in kinds or (scenario.skips and "bad" in kinds))

    def _judge_steps(self, programs: Sequence[Program]) -> None:
        """Ranks take the same steps, and hold the same bits after each."""
        counts = [len(program.taken) for program in programs]
        if max(counts) - min(counts) > 1 + self.scenario.delay:
            raise Violation(f"some ranks went on without others, which took {counts} steps")
        for step in range(max(counts)):
            held = [p.taken[step] for p in programs if len(p.taken) > step]
            drifts = [f.step for f in self.faults if f.kind == "drift" and f.has_happened]
            if not all(_same(each, held[0]) for each in held) and step < min(drifts, default=STEPS):
                raise Violation(f"ranks hold different numbers after step {step}")
            if self._follows_twin and not _same(held[0], self.twin.taken[step]):
                raise Violation(f"step {step} did not end as if nothing had gone wrong")
            for program in programs if self._follows_twin else ():
                if len(program.kept) > step:
                    expected = self.twin.kept[program.rank][step]
                    if not _same(program.kept[step], expected):
                        raise Violation(f"{program.process.name} keeps other numbers")

    def _judge_whole(self, programs: Sequence[Program]) -> None:
        """All ranks took all steps: nothing may be lost."""
        if any(self._is_victim(program) or not program.is_through for program in programs):
            return
        has_drifted = any(f.kind == "drift" and f.has_happened for f in self.faults)
        is_exact = not self.scenario.step_ahead and not has_drifted
        if is_exact and not is_in_balance(programs):
            raise Violation("accumulated is not applied + residual")

    def _judge_waits(self, programs: Sequence[Program]) -> None:
        """Nobody waits beyond the deadline, from when something went wrong on."""
        begins = [f.ends_at for f in self.faults if f.has_happened and f.kind in ("freeze", "slow")]
        for program in programs:
            for began, ended, frozen in program.waits:
                since = max([began, *(moment for moment in begins if moment <= ended)])
                if ended - began - frozen > DEADLINE + REACTION and (
                    ended - since > DEADLINE + REACTION
                ):
                    raise Violation(
                        f"{program.process.name} waited from {began:.2f} s to {ended:.2f} s"
                    )

    def _judge_errors(self, living: Sequence[Program]) -> None:
        """Errors name who is to blame for them."""
        failed = [program for program in living if program.errors]
        if not failed:
            if any(fault.kind == "drift" and fault.has_happened for fault in self.faults):
                raise Violation("a rank drifted away unseen")
            return
        texts = [str(error) for program in failed for _, error in program.errors]
        blamed = [fault for fault in self.faults if fault.has_happened]
        interrupted = {fault.rank for fault in blamed if fault.kind == "interrupt"}
        if all(program.rank in interrupted for program in failed):
            return  # and say so, of course without a rank
        errors = [error for program in failed for _, error in program.errors]
        if [fault.kind for fault in blamed] == ["late"] and not all(
            isinstance(error, sw.errors.DisagreementError) for error in errors
        ):
            raise Violation("ranks that are out of step are told something else")
        if any(f.message is not None and f.message.changes_order for f in blamed):
            return  # a backend that mixes messages up says so, and not whose they were
        if blamed and not any(self._blames(text, fault) for text in texts for fault in blamed):
            raise Violation("no error names who is to blame")

    def _blames(self, text: str, fault: Fault) -> bool:
        """Whether an error names the one who is to blame for a fault."""
        places = [fault.rank if fault.message is None else fault.message.sender, fault.other]
        hosts = [
            SIZE,
            *(rank for rank in range(SIZE) if self.team.processes[rank] is self.team.host),
        ]
        named = {
            int(number)
            for numbers in re.findall(r"\brank(?:s|) (\d+(?:, \d+)*)", text)
            for number in numbers.split(", ")
        }
        nodes = {int(number) for number in re.findall(r"\bmachine (\d+)", text)}
        return (
            (not nodes and bool(named.intersection(places)))
            or (self.scenario.machines and bool(nodes & {place // LOCAL for place in places}))
            or (bool(set(hosts).intersection(places)) and "the process that hosts it" in text)
            or (fault.kind == "raise" and "no room left" in text)
        )


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
