"""Processes as the ranks of one run: started together, watched, and ended together.

`run` does so with any command, and logs what the ranks print; `launcher` with our own workers.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from ..lab import Interrupts
from .errors import CommandError
from .site import Site

_GRACE = 10.0  # seconds for the other ranks to end when they are asked to
_TICK = 0.02
_TAIL = 20  # lines of a failed rank's log


class Ranks:
    """The processes of one run: one on each host of a site, as one rank."""

    def __init__(self, site: Site, command: Sequence[str], port: int) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._site, self._command, self._port = site, command, port

    def start(self, variables: dict[str, str], **keywords: Any) -> subprocess.Popen[bytes]:
        """Start the next rank, with `variables` besides those that describe its place."""
        rank = len(self.processes)
        known = {**variables, **self._site.environment(rank, self._port)}
        process = self._site.start(rank, self._command, known, stdin=subprocess.DEVNULL, **keywords)
        self.processes.append(process)
        return process

    def codes(self) -> list[int | None]:
        """Return the exit code of every rank, None for a rank that still runs."""
        return [process.poll() for process in self.processes]

    def signal(self, number: signal.Signals, ranks: slice = slice(None)) -> None:
        """Send a signal to ranks and to their children, as a terminal would."""
        for process in self.processes[ranks]:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def end(self) -> None:
        """Leave no process behind."""
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()


def run(site: Site, command: Sequence[str], port: int, logs: Path) -> None:
    """Run `command` once on every host, as one rank, until all have ended.

    Raises:
        CommandError: a rank failed, or the run was interrupted.
    """
    with Interrupts() as interrupts, _Logged(site, command, port, logs) as ranks:
        asked, deadline = False, math.inf
        while None in (codes := ranks.codes()):
            time.sleep(_TICK)
            failure = None if asked else ranks.failure()
            if interrupts.count and not asked:
                at_terminal = interrupts.last == signal.SIGINT
                hint = "; press again to stop at once" if at_terminal else ""
                print(f"stopping{hint}", file=sys.stderr, flush=True)
                ranks.signal(interrupts.last)
                asked = True
                if not at_terminal:  # there is nobody to press Ctrl-C again
                    deadline = time.monotonic() + _GRACE
            if failure and deadline == math.inf:
                ranks.signal(signal.SIGTERM)
            some_left = any(code is not None for code in codes)
            if deadline == math.inf and (failure or (asked and some_left)):
                deadline = time.monotonic() + _GRACE  # no rank can go on without the others
            if interrupts.count > 1 or time.monotonic() > deadline:
                ranks.signal(signal.SIGKILL)
    if asked:
        raise CommandError(f"stopped (logs in {logs})", 128 + interrupts.last)
    if failure := ranks.failure():
        rank, code = failure
        if rank:  # rank 0's output was seen
            _show_end(_log(logs, rank))
        raise CommandError(f"rank {rank} {_fate(code)} (logs in {logs})", _shell_code(code))


def search_path() -> str:
    """Return the PATH of ranks, which begins with this Python's own folder."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


class _Logged(Ranks):
    """Ranks with logged output; rank 0's is shown as well."""

    def __init__(self, site: Site, command: Sequence[str], port: int, logs: Path) -> None:
        super().__init__(site, command, port)
        self._failure: tuple[int, int] | None = None
        # Output is shown and logged at once.
        variables = {"PYTHONUNBUFFERED": "1", **os.environ, "PATH": search_path()}
        for rank in range(site.hosts):
            with open(_log(logs, rank), "wb", buffering=0) as log:
                output = log if rank else subprocess.PIPE
                self.start(variables, stdout=output, stderr=output)
        first = self.processes[0]
        self._copying = [
            threading.Thread(target=_copy, args=(source, screen, _log(logs, 0)), daemon=True)
            for source, screen in (
                (first.stdout, sys.stdout.buffer),
                (first.stderr, sys.stderr.buffer),
            )
        ]
        for thread in self._copying:
            thread.start()

    def __enter__(self) -> _Logged:
        return self

    def __exit__(self, *error: object) -> None:
        for thread in self._copying:
            # Longer only if something that rank 0 started still has its output.
            thread.join(timeout=1)

    def failure(self) -> tuple[int, int] | None:
        """The rank that failed first, the worst of them if several did, and its exit code."""
        if self._failure is None:
            failed = [(rank, code) for rank, code in enumerate(self.codes()) if code]
            self._failure = max(failed, key=lambda one: _shell_code(one[1]), default=None)
        return self._failure


def _copy(source: IO[bytes], screen: IO[bytes], log: Path) -> None:
    """Show and log a rank's output as it comes; go on logging if it can no longer be shown."""
    shown = True
    with source, open(log, "ab", buffering=0) as file:
        while content := os.read(source.fileno(), 1 << 16):
            file.write(content)
            try:
                if shown:
                    screen.write(content)
                    screen.flush()
            except (OSError, ValueError):
                shown = False


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


def _show_end(log: Path) -> None:
    lines = log.read_text(errors="replace").splitlines()[-_TAIL:]
    if lines:
        print(f"the end of {log}:", *(f"  {line}" for line in lines), sep="\n", file=sys.stderr)


def _fate(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code
