"""What the commands under `sparsewire bench` share: where they measure, and one measurement."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..bench import contenders
from ..bench.contenders import COMPUTE
from ..bench.plan import Plan, Turn
from ..bench.progress import Progress
from ..bench.results import Contender, Run, Sample, place_in_words, sample
from ..lab import Lab, LabError, Link, Loopback, obstacle, parse_rate
from .errors import USAGE, CommandError, explain_os_error
from .launcher import WorkerError, launch
from .options import BenchScale, BenchStep, BenchTrain
from .records import Record
from .site import Site

STARTING = 120.0  # seconds for all processes to start and to build the model


def check_place(loopback: bool) -> None:
    """Refuse a lab where none can be built."""
    why_not = None if loopback else obstacle()
    if why_not:
        raise CommandError(f"{why_not}; or add --loopback to measure without a network of its own")


def place(hosts: int, rate: int | None, loopback: bool) -> Site:
    """Where to measure, to be entered yet."""
    return Loopback(hosts) if loopback else Lab(hosts, None if rate is None else f"{rate}bit")


def name_contenders(peers: Sequence[str], schemes: Sequence[str]) -> list[str]:
    """Everybody by the names of the table; given twice counts once."""
    names = [contenders.peer(text) for text in peers]
    names += [contenders.scheme(text) for text in schemes]
    if not names:
        raise CommandError("there is nothing to measure: name --schemes or --peers", USAGE)
    return list(dict.fromkeys(names))


def read_rate(text: str, flag: str) -> int | None:
    """A rate in bits per second, None for unshaped links."""
    try:
        return None if text.lower() == "none" else parse_rate(text)
    except LabError as error:
        raise CommandError(f"{flag}: {error}", USAGE) from None


def make_folder(folder: Path) -> None:
    """Have a folder for results, before anything is measured in vain."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise explain_os_error(error, "write results to") from None


def arguments(command: str, options: BenchStep | BenchTrain | BenchScale) -> dict[str, Any]:
    """A command and its options as JSON can hold them."""
    given = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(options).items()}
    return {"command": command, **given}


class Session:
    """Measures all contenders on one network, whatever becomes of some of them."""

    def __init__(self, plan: Plan, names: list[str], progress: Progress, debug: bool) -> None:
        self.model: dict[str, Any] = {}
        self.buckets: dict[str, list[dict[str, list[int]]]] = {}  # by contender, as DDP cut them
        self._plan, self._progress, self._debug = plan, progress, debug
        self._samples: dict[str, list[Sample]] = {name: [] for name in names}
        self._failed: dict[str, str] = {}
        self._done: set[Turn] = set()
        self._turn: Turn | None = None
        self._heard = 0.0

    def run(self, site: Site, rate: int | None) -> Run:
        """Measure on `site`, with new processes after a contender has broken the old ones."""
        links: list[Link] = []
        if isinstance(site, Lab):
            network = "lab"
            self._progress.say("measuring the links")
            links = site.check()
        else:
            network = "loopback"
        number = "one host" if site.hosts == 1 else f"{site.hosts} hosts"
        self._progress.begin(f"{number} {place_in_words(network, rate)}")
        while turns := self._left():
            try:
                self._launch(site, turns)
            except WorkerError as error:
                if not self._left():
                    break  # all is measured; they only did not part in peace
                if self._turn is None or self._turn[1] == COMPUTE:
                    raise
                self._fail(self._turn[1], str(error))
        found = tuple(
            Contender(name, tuple(samples), self._failed.get(name))
            for name, samples in self._samples.items()
        )
        return Run(network, rate, tuple(links), found)

    def _launch(self, site: Site, turns: tuple[Turn, ...]) -> None:
        self._turn, self._heard = None, time.monotonic()
        plan = replace(self._plan, turns=turns, counts=self._counts())
        orders = plan.to_dict()
        launch("measure", orders, site, self._hear, debug=self._debug, overdue=self._overdue)

    def _left(self) -> tuple[Turn, ...]:
        """The turns that are still to be taken."""
        return tuple(
            turn
            for turn in self._plan.turns
            if turn not in self._done and turn[1] not in self._failed
        )

    def _counts(self) -> dict[str, int]:
        """How many steps a turn of each has, as the first one decided."""
        return {
            name: sum(sample.round == samples[0].round for sample in samples)
            for name, samples in self._samples.items()
            if samples
        }

    def _hear(self, record: Record) -> None:
        self._heard = time.monotonic()
        kind = record["record"]
        if kind == "opening":
            self.model = {k: v for k, v in record.items() if k != "record"}
        elif kind == "turn":
            self._turn = (record["round"], record["contender"])
            self._progress.turn(*self._turn)
        elif kind == "step":
            self._progress.step(record["seconds"])
        elif kind == "measured":
            turn = (record["round"], record["contender"])
            self._samples[turn[1]] += [sample({**s, "round": turn[0]}) for s in record["steps"]]
            self.buckets[turn[1]] = record["buckets"]
            self._done.add(turn)
            self._progress.done()
        elif kind == "failed":
            self._fail(record["contender"], record["reason"])

    def _fail(self, name: str, reason: str) -> None:
        missed = sum(turn not in self._done for turn in self._plan.turns if turn[1] == name)
        self._failed[name] = reason
        self._progress.failed(name, reason, missed)

    def _overdue(self) -> str | None:
        silence = time.monotonic() - self._heard
        if self._turn is None:
            limit = max(STARTING, self._plan.timeout)
            return f"the workers did not start within {limit:g} s" if silence > limit else None
        if silence > self._plan.timeout:
            return f"no step came to its end for {self._plan.timeout:g} s: it hangs, or needs more"
        return None
