"""Starts one worker process on each host of a site, watches them, and leaves none behind.

The launcher hosts the store and owns the terminal: workers send it their records through a
pipe and their errors in files, so that a person sees one sentence and not N tracebacks.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsewire import kernels
from sparsewire.report import plural

from .errors import CommandError, explain_os_error
from .group import ask_to_stop, host_store
from .interrupts import Interrupts
from .process import ORDERS, RECORDS_FD, error_file
from .records import Emit
from .site import Site

_GRACE = 6.0  # seconds for the others to say what they saw when one worker fails
_TICK = 0.1


class WorkerError(CommandError):
    """A worker failed, or was given up; another set of workers may do better."""


@dataclass(frozen=True)
class Job:
    """What the workers of one launch do.

    Args:
        module: what each of them runs.
        orders: what they read, as JSON can hold it.
        stops_gently: whether they look for `ask_to_stop`; else Ctrl-C ends them at once.
    """

    module: str
    orders: Any
    stops_gently: bool = True


def launch(
    job: Job,
    site: Site,
    emit: Emit,
    *,
    port: int | None = None,
    debug: bool = False,
    overdue: Callable[[], str | None] = lambda: None,
) -> signal.Signals | None:
    """Do a job with one worker on each host of `site`.

    Args:
        emit: takes every record as rank 0 makes it.
        port: where they meet, on the first host; a free one if not given.
        debug: show tracebacks and what the workers print.
        overdue: asked over and over; a sentence says why the workers are given up.

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
        (folder / ORDERS).write_text(json.dumps(job.orders))
        crew = _Crew(job.module, folder, site, store.port, debug, emit)
        try:
            asked = False
            while crew.working():
                crew.listen()
                crew.raise_if_failed()
                reason = overdue()
                if reason is not None:
                    raise WorkerError(reason)
                if interrupts.count and not job.stops_gently:
                    raise CommandError("stopped; nothing was saved", 128 + interrupts.last)
                if interrupts.count and not asked:
                    crew.refuse_if_starting(interrupts.last)
                    print("stopping; press again to stop at once", file=sys.stderr, flush=True)
                    ask_to_stop(store)
                    asked = True
                elif interrupts.count > 1:
                    raise CommandError("stopped at once; nothing was saved", 128 + interrupts.last)
        finally:
            crew.end()
    return interrupts.last if interrupts.count else None


class _Crew:
    """The worker processes of one launch, and the pipe that rank 0 writes its records to."""

    def __init__(
        self, module: str, folder: Path, site: Site, port: int, debug: bool, emit: Emit
    ) -> None:
        self._folder = folder
        self._emit = emit
        self._debug = debug
        self._heard = b""
        self._started = False
        self._last_step = 0
        self._pipe, outlet = os.pipe()
        self._processes: list[subprocess.Popen[bytes]] = []
        command = [sys.executable, "-m", module, str(folder)]
        # What libraries print would tear the progress display; --debug lets it through.
        output = None if debug else subprocess.DEVNULL
        try:
            for rank in range(site.hosts):
                tells = rank == 0
                self._processes.append(
                    site.start(
                        rank,
                        command,
                        site.environment(rank, port) | ({RECORDS_FD: str(outlet)} if tells else {}),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        pass_fds=[outlet] if tells else [],
                    )
                )
        except OSError as error:
            self.end()
            raise explain_os_error(error, "start a worker") from None
        finally:
            os.close(outlet)

    def working(self) -> bool:
        """Whether some worker still runs, or has left something unread."""
        return self._pipe >= 0 or any(process.poll() is None for process in self._processes)

    def listen(self) -> None:
        """Pass on what rank 0 has sent, waiting a little for more."""
        if self._pipe < 0:
            time.sleep(_TICK / 10)
            return
        if not select.select([self._pipe], [], [], _TICK)[0]:
            return
        content = os.read(self._pipe, 1 << 16)
        if not content:
            os.close(self._pipe)
            self._pipe = -1
        *lines, self._heard = (self._heard + content).split(b"\n")
        for line in lines:
            record = json.loads(line)
            self._started = True
            self._last_step = record.get("step", 0)
            self._emit(record)

    def refuse_if_starting(self, number: signal.Signals) -> None:
        """End a run at once that has not begun to train."""
        if not self._started:
            raise CommandError("stopped before the first step", 128 + number)

    def raise_if_failed(self) -> None:
        """Once a worker has failed, wait a little for the others and say what happened."""
        failed = [rank for rank, code in enumerate(self._codes()) if code]
        if not failed:
            return
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and self.working() and not self._explained():
            self.listen()
        raise WorkerError(self._diagnosis(self._codes()))

    def _explained(self) -> bool:
        """Whether a worker fell by a signal and another one has told where."""
        fallen = any(code is not None and code < 0 for code in self._codes())
        return fallen and any(self._folder.glob("error-*.json"))

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]

    def _diagnosis(self, codes: list[int | None]) -> str:
        """The sentence that names the first cause, not what followed from it."""
        reports = {
            rank: json.loads(path.read_text())
            for rank in range(len(codes))
            if (path := error_file(self._folder, rank)).exists()
        }
        if self._debug:
            for rank, report in reports.items():
                print(f"worker {rank}:\n{report['traceback']}", file=sys.stderr)
        told = [report["steps"] for report in reports.values() if report["steps"] is not None]
        for rank, code in enumerate(codes):
            if code is not None and code < 0:
                steps = min(told, default=self._last_step)
                where = (
                    f"after {plural(steps, 'step')}" if self._started else "before the first step"
                )
                return f"worker {rank} was ended by {signal.Signals(-code).name} {where}"
        for rank, code in enumerate(codes):
            if code and rank not in reports:
                return f"worker {rank} ended with code {code} and said nothing (try --debug)"
        rank, report = min(
            reports.items(), key=lambda item: (item[1]["aftermath"], item[1]["when"])
        )
        if report["expected"]:
            return str(report["sentence"])
        steps = report["steps"]
        where = f" after {plural(steps, 'step')}" if steps is not None else ""
        return f"worker {rank} failed{where}: {report['sentence']}"

    def end(self) -> None:
        """Leave no process behind."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
