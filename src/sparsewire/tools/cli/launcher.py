"""Starts one process on each host of a site, watches them, and leaves none behind.

`launch` runs our own workers: the first one sends its records through a pipe and all write their
errors into files, so that a person sees one sentence and not N tracebacks. `ranks.run` does the
same for any command. What starts and kills processes is the site, so that they die with this one;
the variables are those of torchrun, whose workers join a group the same way.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsewire import kernels
from sparsewire.report import plural

from ..lab import Interrupts
from .errors import CommandError, explaining
from .group import host_store
from .ranks import Ranks
from .site import Site
from .worker import ORDERS, RECORDS_FD, Emit, error_file

_GRACE = 6.0  # seconds for the other workers to report their errors after one fails
_TICK = 0.1


class WorkerError(CommandError):
    """A worker failed or was given up; a new set of workers may succeed."""


def launch(
    work: str,
    orders: Any,
    site: Site,
    emit: Emit,
    *,
    stops_gently: bool = False,
    port: int | None = None,
    debug: bool = False,
    overdue: Callable[[], str | None] = lambda: None,
) -> signal.Signals | None:
    """Start one worker on each host of `site`, and wait for their work.

    Args:
        work: a key of `worker.WORK`.
        orders: the work's arguments, as JSON can hold them.
        emit: takes every record as rank 0 makes it.
        stops_gently: Ctrl-C is passed on, for all ranks to stop after the same step; else it ends
            them at once.
        port: where they meet, on the first host; a free one if not given.
        debug: show tracebacks and what the workers print.
        overdue: called repeatedly; returns a reason for giving the workers up, else None.

    Returns:
        The signal that asked the run to stop, if one did.

    Raises:
        WorkerError: a worker failed, or they were given up.
        CommandError: the run was stopped at once.
    """
    with site.inside(0):  # sockets stay where they are made
        store = host_store(site.addresses[0], port)
    kernels.prepare("cpu")  # once, for all workers to find
    with tempfile.TemporaryDirectory(prefix="sparsewire-") as name, Interrupts() as interrupts:
        folder = Path(name)
        (folder / ORDERS).write_text(json.dumps({"work": work, "orders": orders}))
        crew = _Crew(folder, site, store.port, debug, emit)
        asked, at_work = False, True
        try:
            crew.begin()
            while at_work:
                at_work = crew.listen()
                crew.raise_if_failed()
                reason = overdue()
                if reason is not None:
                    raise WorkerError(reason)
                if interrupts.count and not stops_gently:
                    raise CommandError("stopped; nothing was saved", 128 + interrupts.last)
                if interrupts.count > 1:
                    raise CommandError("stopped at once; nothing was saved", 128 + interrupts.last)
                if interrupts.count and not asked:
                    crew.ask_to_stop(interrupts.last)
                    asked = True
        finally:
            crew.end()
    return interrupts.last if interrupts.count else None


class _Crew(Ranks):
    """The workers of one launch, and the records from rank 0."""

    def __init__(self, folder: Path, site: Site, port: int, debug: bool, emit: Emit) -> None:
        super().__init__(site, [sys.executable, "-m", f"{__package__}.worker", str(folder)], port)
        self._folder, self._debug, self._emit = folder, debug, emit
        self._records: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_told = False  # all that rank 0 had to say
        self._last: dict[str, Any] | None = None  # record

    def begin(self) -> None:
        """Start all of them."""
        hosts = len(self._site.addresses)
        pipe, outlet = os.pipe()
        threading.Thread(target=self._read, args=(pipe,), daemon=True).start()
        # What libraries print would tear the progress display; --debug lets it through.
        output = None if self._debug else subprocess.DEVNULL
        # Rank 0 need not host the store: the launcher does, as torchrun's agent would.
        known = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        with open(outlet, "wb"), explaining("start a worker"):
            first = {**known, RECORDS_FD: str(outlet)}
            self.start(first, stdout=output, stderr=output, pass_fds=[outlet])
            for _ in range(1, hosts):
                self.start(known, stdout=output, stderr=output)

    def _read(self, pipe: int) -> None:
        with open(pipe, encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):  # else it was killed while it wrote
                    self._records.put(json.loads(line))
        self._records.put(None)

    def listen(self) -> bool:
        """Wait briefly for a record and pass it on; return whether there may be another."""
        if self._is_told:
            time.sleep(_TICK / 10)
            return None in self.codes()
        with contextlib.suppress(queue.Empty):
            record = self._records.get(timeout=_TICK)
            if record is None:
                self._is_told = True
            else:
                self._last = record
                self._emit(record)
        return True

    def ask_to_stop(self, number: signal.Signals) -> None:
        """Ask rank 0 to stop together with all other ranks, once training has begun."""
        if self._last is None:
            raise CommandError("stopped before the first step", 128 + number)
        print("stopping; press again to stop at once", file=sys.stderr, flush=True)
        self.signal(signal.SIGINT, slice(1))

    def raise_if_failed(self) -> None:
        """Raise an error if a worker has failed, after waiting briefly for the others' reports."""
        if not any(self.codes()):
            return
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and not self._explained() and self.listen():
            pass
        raise WorkerError(self._diagnosis(self.codes()))

    def _explained(self) -> bool:
        """Whether a signal ended a worker and another worker has reported the step."""
        fallen = any(code is not None and code < 0 for code in self.codes())
        return fallen and any(self._folder.glob("error-*.json"))

    def _diagnosis(self, codes: list[int | None]) -> str:
        """Return a sentence that names the first cause, not its consequences."""
        reports = {
            rank: json.loads(path.read_text())
            for rank in range(len(codes))
            if (path := error_file(self._folder, rank)).exists()
        }
        if self._debug:
            for rank, report in reports.items():
                print(f"worker {rank}:\n{report['traceback']}", file=sys.stderr)
        for rank, code in enumerate(codes):
            if code is not None and code < 0:
                where = self._place_of_the_fall(reports)
                return f"worker {rank} was ended by {signal.Signals(-code).name} {where}"
        for rank, code in enumerate(codes):
            if code and rank not in reports:
                return f"worker {rank} ended with code {code} without a message (try --debug)"
        rank, report = min(
            reports.items(), key=lambda item: (item[1]["aftermath"], item[1]["when"])
        )
        if report["expected"]:
            return str(report["sentence"])
        steps = report["steps"]
        where = f" after {plural(steps, 'step')}" if steps is not None else ""
        return f"worker {rank} failed{where}: {report['sentence']}"

    def _place_of_the_fall(self, reports: dict[int, Any]) -> str:
        if self._last is None:
            return "before the first step"
        told = [report["steps"] for report in reports.values() if report["steps"] is not None]
        return f"after {plural(min(told, default=self._last.get('step', 0)), 'step')}"
