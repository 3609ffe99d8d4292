"""Shared by the commands under `sparsewire bench`: checks, and one measurement."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..bench.contenders import COMPUTE, peer, scheme
from ..bench.kinds import as_json, draw, shown
from ..bench.results import Contender, Results, Run
from ..bench.words import place_in_words
from ..lab import Lab, Link
from .errors import USAGE, CommandError
from .launcher import WorkerError, launch
from .options import BenchScale, BenchStep, BenchTrain
from .progress import Progress
from .publish import make_folder, publish
from .site import Site, check_lab
from .worker import Record

_STARTING = 120.0  # seconds for all processes to start and to build the model


def prepare(options: BenchStep | BenchTrain | BenchScale) -> None:
    """Check that a lab can be built and that results can be written."""
    if not options.loopback:
        check_lab("add --loopback to measure without a network of its own")
    make_folder(options.out)


def tell(
    results: Results,
    options: BenchStep | BenchTrain | BenchScale,
    told: Sequence[object] | None = None,
) -> None:
    """Write all files, and print the JSON or `told`, by default all tables and findings."""
    if told is None:
        told = [*shown(results), f"report: {options.out / 'report.html'}"]
    publish(options.out, as_json(results), partial(draw, results), told, options.json)


def name_contenders(peers: Sequence[str], schemes: Sequence[str]) -> list[str]:
    """Return the contenders by their names in tables, without duplicates."""
    names = [*map(peer, peers), *map(scheme, schemes)]
    if not names:
        raise CommandError("there is nothing to measure: name --schemes or --peers", USAGE)
    return list(dict.fromkeys(names))


class Session(ABC):
    """Has workers try all contenders on one network, and goes on if some fail.

    Attributes:
        model: its size, as the workers report it.
        failed: the reason for each contender that failed.
        at_work: the current contender.
        place: the network in words.
    """

    work = ""
    """The name of the work in `worker.WORK`."""

    def __init__(self, total: int, timeout: float, progress: Progress, debug: bool) -> None:
        self.model: Record = {}
        self.failed: dict[str, str] = {}
        self.at_work: str | None = None
        self.progress = progress
        self.place = ""
        self._total, self._timeout, self._debug = total, timeout, debug
        self._heard = 0.0

    @abstractmethod
    def left(self) -> dict[str, Any] | None:
        """Return the orders for the remaining work, None if there is none."""

    @abstractmethod
    def hear(self, record: Record) -> None:
        """Process a record of the workers."""

    def fail(self, name: str, reason: str) -> None:
        """Go on without a contender."""
        self.failed[name] = reason
        self.progress.keep(f"{name} failed: {reason}", "yellow")

    @abstractmethod
    def contenders(self) -> tuple[Contender, ...]:
        """Return what was measured."""

    def run(self, site: Site, rate: int | None) -> Run:
        """Try all contenders on `site`, in new processes after one has failed."""
        network = "lab" if isinstance(site, Lab) else "loopback"
        links = tuple[Link, ...]()
        self.place = "one host" if site.hosts == 1 else f"{site.hosts} hosts"
        self.place += f" {place_in_words(network, rate)}"
        if isinstance(site, Lab):
            self.progress.begin("measuring the links")
            links = tuple(site.check())
        self.progress.begin(self.place, self._total)
        while (orders := self.left()) is not None:
            self._start()
            try:
                launch(
                    self.work, orders, site, self._hear, debug=self._debug, overdue=self._overdue
                )
            except WorkerError as error:
                if self.left() is None:
                    break  # the work is done; only the shutdown failed
                if self.at_work is None or self.at_work == COMPUTE:
                    raise
                self.fail(self.at_work, str(error))
        return Run(site.hosts, network, rate, links, self.contenders())

    def _start(self) -> None:
        self.at_work, self._heard = None, time.monotonic()

    def _hear(self, record: Record) -> None:
        self._heard = time.monotonic()
        kind = record.pop("record")
        if kind == "opening":
            self.model = record
        elif kind == "failed":
            self.fail(record["contender"], record["reason"])
        else:
            self.at_work = record.get("contender", self.at_work)
            self.hear({"kind": kind, **record})

    def _overdue(self) -> str | None:
        silence = time.monotonic() - self._heard
        limit = self._timeout if self.at_work else max(_STARTING, self._timeout)
        if silence <= limit:
            return None
        if self.at_work is None:
            return f"the workers did not start within {limit:g} s"
        return f"no step ended for {limit:g} s: it hangs, or needs a longer --timeout"
