"""Starts the workers of one machine as processes, watches them, and leaves none behind.

The launcher hosts the store and owns the terminal: workers send it their records through a
pipe and their errors in files, so that a person sees one sentence and not N tracebacks.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .. import kernels
from . import worker
from .errors import CommandError, explain_os_error
from .group import ask_to_stop, host_store
from .interrupts import Interrupts
from .plan import Plan
from .records import Emit

_GRACE = 6.0  # seconds for the others to say what they saw when one worker fails
_TICK = 0.1


def launch(
    plans: Sequence[Plan], workers: int, port: int | None, debug: bool, emit: Emit
) -> signal.Signals | None:
    """Train `plans` in turn with `workers` local processes.

    Args:
        emit: takes every record as rank 0 makes it.

    Returns:
        The signal that asked the run to stop, if one did.

    Raises:
        CommandError: a worker failed, or the run was stopped at once.
    """
    store = host_store(port)
    kernels.prepare("cpu")  # once, for all workers to find
    with tempfile.TemporaryDirectory(prefix="sparsewire-") as name, Interrupts() as interrupts:
        folder = Path(name)
        (folder / worker.PLANS).write_text(json.dumps([asdict(plan) for plan in plans]))
        crew = _Crew(folder, workers, store.port, debug, emit)
        try:
            asked = False
            while crew.working():
                crew.listen()
                crew.raise_if_failed()
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

    def __init__(self, folder: Path, workers: int, port: int, debug: bool, emit: Emit) -> None:
        self._folder = folder
        self._emit = emit
        self._debug = debug
        self._heard = b""
        self._started = False
        self._last_step = 0
        self._pipe, outlet = os.pipe()
        common = {
            **os.environ,
            "WORLD_SIZE": str(workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            worker.PARENT: str(os.getpid()),
        }
        common.pop(worker.RECORDS_FD, None)
        if "lo" in (name for _, name in socket.if_nameindex()):
            # Gloo looks the host name up otherwise, which need not lead to this machine.
            common.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(workers):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                if rank == 0:
                    own[worker.RECORDS_FD] = str(outlet)
                self._processes.append(self._start({**common, **own}, outlet))
        except OSError as error:
            self.end()
            raise explain_os_error(error, "start a worker") from None
        finally:
            os.close(outlet)

    def _start(self, environment: dict[str, str], outlet: int) -> subprocess.Popen[bytes]:
        # What libraries print would tear the progress display; --debug lets it through.
        output = None if self._debug else subprocess.DEVNULL
        return subprocess.Popen(
            [sys.executable, "-m", "sparsewire.cli.worker", str(self._folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[outlet] if worker.RECORDS_FD in environment else [],
            # A session of their own: the terminal's Ctrl-C reaches the launcher alone.
            start_new_session=True,
        )

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
            self._last_step = record["step"]
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
        raise CommandError(self._diagnosis(self._codes()))

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
            if (path := worker.error_file(self._folder, rank)).exists()
        }
        if self._debug:
            for rank, report in reports.items():
                print(f"worker {rank}:\n{report['traceback']}", file=sys.stderr)
        told = [report["steps"] for report in reports.values() if report["steps"] is not None]
        for rank, code in enumerate(codes):
            if code is not None and code < 0:
                steps = min(told, default=self._last_step)
                where = f"after {steps} steps" if self._started else "before the first step"
                return f"worker {rank} was ended by {signal.Signals(-code).name} {where}"
        for rank, code in enumerate(codes):
            if code and rank not in reports:
                return f"worker {rank} ended with code {code} and said nothing (try --debug)"
        rank, report = min(reports.items(), key=lambda item: (item[1]["aftermath"], item[0]))
        if report["expected"]:
            return str(report["sentence"])
        where = f" after {report['steps']} steps" if report["steps"] is not None else ""
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
