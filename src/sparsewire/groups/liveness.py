"""After a failure: find out which ranks are still there and which are behind, through the store.

A backend's error contains an address at best, and reaches only some ranks at once. The first rank
that sees an error therefore writes a note to the store. The others read it within a second, and
write what they are doing and since when. All of them name the ranks that did not answer, or else
the rank that is behind.

The environment and the store are passed in, so that all of this also runs on a virtual clock.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch._C._distributed_c10d import Store as TorchStore

from ..errors import ExchangeError, SparsewireError
from .environment import Environment

PATIENCE = 1.5  # seconds to wait for answers: ranks look for a note four times a second
LOOK = 0.05  # seconds between two checks for answers
LIMIT = 4.0  # seconds to wait for the store, which may be frozen or cut off
GRACE = 5.0  # seconds after the deadline in which the backend may report the cause itself
BEHIND = 1.0  # seconds without progress after which a rank counts as behind

Stage = Literal["computing", "waiting", "finished"]  # in the order in which a job enters them
_STAGES: tuple[Stage, ...] = get_args(Stage)


class Store(Protocol):
    """The part of a torch store that is used here."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key."""

    def set(self, key: str, value: str, /) -> None:
        """Write the value of a key."""

    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None:
        """Wait until all keys exist. Raise RuntimeError after the time-out."""

    def delete_key(self, key: str, /) -> bool:
        """Delete a key, and return whether it existed."""


class Report(NamedTuple):
    """A rank's answer to an inquiry: its job, and the time since the job's stage began."""

    number: int  # of the job, the same on all ranks
    stage: Stage
    doing: str
    seconds: float  # in this stage
    fault: str = ""  # why the rank broke off by itself, if it did

    @property
    def place(self) -> tuple[int, int]:
        """The rank's progress, for comparison with others."""
        return self.number, _STAGES.index(self.stage)

    def __str__(self) -> str:
        if self.stage == "finished":
            return f"it finished {self.doing} {self.seconds:.0f} s ago and has begun nothing since"
        verb = "busy" if self.stage == "computing" else "waiting for others"
        return f"it has been {verb} in {self.doing} for {self.seconds:.0f} s"

    @staticmethod
    def read(text: bytes) -> Report | None:
        """Return the report that another rank wrote; None if the text is not a report."""
        try:
            number, stage, doing, seconds, fault = json.loads(text)
            report = Report(int(number), stage, str(doing)[:200], float(seconds), str(fault)[:200])
        except (TypeError, ValueError):
            return None
        return report if stage in _STAGES else None


class Progress:
    """This rank's progress: the current job, its stage, and the time since it began.

    All ranks run the same jobs in the same order: the buckets of a step, or rounds of updates. In
    each job, a rank computes and waits for the others in turn.
    """

    def __init__(self, environment: Environment) -> None:
        self._clock = environment.now
        self._began = self._clock()
        # replaced as a whole, since other threads read it
        self._now: tuple[int, Stage, str, float] = 0, "computing", "the first meeting", self._began

    @property
    def doing(self) -> str:
        """The job under way, or the last one."""
        return self._now[2]

    @property
    def stage(self) -> Stage:
        """Whether the job computes, waits for other ranks, or is finished."""
        return self._now[1]

    @property
    def is_first_meeting(self) -> bool:
        """Whether the ranks have not met yet."""
        return self._now[0] == 0 and self.stage != "finished"

    @property
    def elapsed(self) -> float | None:
        """Seconds since the job under way began; None if there is none."""
        return None if self.stage == "finished" else self._clock() - self._began

    @property
    def stuck_for(self) -> float:
        """Seconds since the last progress of the job under way; 0 if there is none."""
        _, stage, _, since = self._now
        return 0.0 if stage == "finished" else self._clock() - since

    def begin(self, doing: str) -> None:
        """Begin the next job."""
        self._began = self._clock()
        self._now = self._now[0] + 1, "computing", doing, self._began

    def enter(self, stage: Stage) -> None:
        """Enter another stage of the job, such as its end."""
        number, _, doing, _ = self._now
        self._now = number, stage, doing, self._clock()

    def report(self) -> Report:
        """Return the report for a rank that asks."""
        number, stage, doing, since = self._now
        return Report(number, stage, doing, self._clock() - since)


class Liveness:
    """Tells the other ranks of a group when an exchange has failed, and finds out which are
    missing.

    Calls to the store have no time-out of their own: if its host is frozen or cut off, they block
    for ever. Only `inquire` and `failure` are safe on a thread that others wait for.

    Arguments:
        rank, size: This rank, and the number of ranks.
        timeout: The number of seconds that an exchange may take.
        environment: The clock and the threads. By default, the machine's.
    """

    def __init__(
        self, rank: int, size: int, timeout: float, environment: Environment | None = None
    ) -> None:
        self.timeout = timeout
        self.environment = environment or Environment()
        self.progress = Progress(self.environment)
        self.given_up = False  # no thread of this rank may wait for others any longer
        self.reason: SparsewireError | None = None  # why
        self.fault = ""  # what to tell others if this rank broke off by itself
        self._rank = rank
        self._size = size
        self._store: Store | None = None
        self._lock = self.environment.lock()
        self._finding: str | None = None

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks."""
        return self._size == 1

    def give_up(self, reason: SparsewireError) -> None:
        """End all waiting for other ranks on this rank."""
        self.reason = self.reason or reason
        self.given_up = True

    def arrive(self, store: Store) -> None:
        """Join the first meeting, in a part of the store that only this group uses."""
        self._store = store
        store.set(f"come/{self._rank}", "1")

    def alarm(self, cause: str) -> None:
        """Tell the others that a collective failed here."""
        assert self._store is not None
        with contextlib.suppress(RuntimeError):  # if the store is gone, `_findings` says so
            if not self._store.check(["alarm"]):
                self._store.set("alarm", f"rank {self._rank}: {cause}"[:500])

    def alarmed(self) -> str | None:
        """Return another rank's alarm, or None."""
        if self._store is None or not self._store.check(["alarm"]):
            return None
        note = bytes(self._store.get("alarm")).decode(errors="replace")
        return None if note.startswith(f"rank {self._rank}:") else note

    def answer(self) -> None:
        """Write this rank's report for the ranks that ask."""
        if self._store is not None:
            report = self.progress.report()._replace(fault=self.fault)
            self._store.set(f"here/{self._rank}", json.dumps(report))

    def inquire(self, cause: str) -> str:
        """Tell the other ranks about a failure here. Return a text that names the missing ranks.

        Returns within `LIMIT` seconds, even if the store does not answer. A group fails only once,
        so the result of the first inquiry serves all later ones.
        """

        def ask() -> str:
            began = self.environment.now()
            self.alarm(cause)
            seconds = self.environment.now() - began
            finding = self._findings(cause)
            if seconds > BEHIND and "the process that hosts it" not in finding:
                finding += (
                    f"; the store took {seconds:.0f} s to answer: the process that hosts it "
                    f"(often rank 0) was frozen or cut off, or this one"
                )
            return finding

        with self._lock:
            if self._finding is None:
                self._finding = self._ask(ask)
            return self._finding

    def _ask(self, ask: Callable[[], str]) -> str:
        try:
            if self._store is not None:
                return self.environment.within(LIMIT, ask)
        except TimeoutError:
            pass
        except Exception as error:  # waiting threads must still learn of the failure
            return f"the other ranks could not be asked: {error}"
        return (
            "the store does not answer: the process that hosts it (often rank 0) is frozen or "
            "cut off"
        )

    def _findings(self, cause: str) -> str:
        """Return a text that names missing or late ranks, and the first alarm if it is another."""
        try:
            if self.progress.is_first_meeting:
                late = self._without("come", self._others)
                if late:
                    return f"{self._named(late)} of {self._size} did not come"
            note, reports = self.alarmed(), self._call_roll()
        except RuntimeError:
            return "the store is out of reach: the process that hosts it (often rank 0) is gone"
        missing = [rank for rank in self._others if rank not in reports]
        first = "" if note is None or note in cause else f"; {note}"
        if missing:
            who = self._named(missing)
            return f"{who} of {self._size} did not answer: dead, stopped or out of reach{first}"
        broken_off = self._broken_off(reports)
        if broken_off:
            return broken_off
        behind = self._behind(reports)
        return "all ranks still answer" + (f", but {behind}" if behind else "") + first

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _without(self, key: str, ranks: Iterable[int]) -> list[int]:
        """Return which of these ranks have written nothing under a key."""
        assert self._store is not None
        return [rank for rank in ranks if not self._store.check([f"{key}/{rank}"])]

    def _call_roll(self) -> dict[int, Report | None]:
        """Answer, wait for the answers of the others, and return those that arrived."""
        assert self._store is not None
        self.answer()
        # Count checks, not seconds: on a busy machine they take longer, and so do answers.
        missing, looks, end = self._others, 0, self.environment.now() + 2 * PATIENCE
        while (missing := self._without("here", missing)) and self.environment.now() < end:
            if looks * LOOK >= PATIENCE:
                break
            self.environment.sleep(LOOK)
            looks += 1
        came = [rank for rank in range(self._size) if rank not in missing]
        return {rank: Report.read(bytes(self._store.get(f"here/{rank}"))) for rank in came}

    def _broken_off(self, reports: Mapping[int, Report | None]) -> str:
        """Return the ranks that broke off by themselves, and why; empty if there are none."""
        faults = {rank: report.fault for rank, report in reports.items() if report is not None}
        return ", ".join(
            f"rank {rank} of {self._size} {fault}" for rank, fault in faults.items() if fault
        )

    def _behind(self, reports: Mapping[int, Report | None]) -> str:
        """Return the ranks that are farthest behind, in words; an empty text if there are none."""
        places = {rank: report.place for rank, report in reports.items() if report is not None}
        hindmost, foremost = min(places.values()), max(places.values())
        behind = [rank for rank, place in places.items() if place == hindmost]
        report = reports[behind[0]]
        if report is None or hindmost == foremost or report.seconds < BEHIND:
            return ""
        verb = "is" if len(behind) == 1 else "are"
        last = str(report) if len(behind) == 1 else f"of rank {behind[0]}, {report}"
        return f"{self._named(behind)} of {self._size} {verb} behind: {last}"

    @staticmethod
    def _named(ranks: list[int]) -> str:
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

    def failure(self, cause: BaseException) -> ExchangeError:
        """Tell the other ranks, find out who is missing, and return the error to raise."""
        doing, stage = self.progress.doing, self.progress.stage
        is_first_meeting = self.progress.is_first_meeting
        text = " ".join(str(cause).split()) or type(cause).__name__
        where = f"on rank {self._rank} of {self._size}"
        what = f"{doing} failed {where}"
        if stage == "finished":
            what = f"the group failed {where} after {doing}"
        finding = f"; {self.inquire(text)}" if self._size > 1 else ""
        advice = (
            f"All ranks must attach, in the same order, within {self.timeout:g} seconds: look at "
            f"the logs of the others"
        )
        if not is_first_meeting:
            advice = (
                f"Weights and memory are those of the last whole step: restart from a "
                f"checkpoint{self._hint(text)}"
            )
        error = ExchangeError(f"{what}{finding}. Cause: {text[:300]}. {advice}")
        error.__cause__ = cause
        return error

    def _hint(self, text: str) -> str:
        """Return advice for the case that a rank was only slow."""
        if not any(words in text.lower() for words in ("timed out", "nothing moved")):
            return ""
        return (
            f", and if a rank is slow rather than lost, give it more than timeout={self.timeout:g}"
        )


def store_of(group: dist.ProcessGroup) -> TorchStore:
    """Return a process group's store, over a new connection."""
    store: Any = dist.distributed_c10d._get_process_group_store(group)
    own: TorchStore = store.clone() if hasattr(store, "clone") else store
    return own


def part_of(store: TorchStore, number: int) -> Store:
    """Return the part of a store that one meeting uses."""
    return PrefixStore(f"sparsewire/{number}", store)
