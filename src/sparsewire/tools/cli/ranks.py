"""Any command as the ranks of a lab: started together, logged, watched, and ended together."""

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
from typing import IO

from ..lab import Lab, Loopback
from .errors import CommandError
from .interrupts import Interrupts

_GRACE = 10.0  # seconds for the other ranks to end when they are asked to
_TICK = 0.02
_TAIL = 20  # lines of a failed rank's log


def run(place: Lab | Loopback, command: Sequence[str], port: int, logs: Path) -> None:
    """Run `command` once on every host, as one rank, until all have ended.

    Raises:
        CommandError: a rank failed, or the run was interrupted.
    """
    with Interrupts() as interrupts, _Crew(place, command, port, logs) as crew:
        asked, deadline = False, math.inf
        while crew.working():
            time.sleep(_TICK)
            failure = None if asked else crew.failure()
            if interrupts.count and not asked:
                at_terminal = interrupts.last == signal.SIGINT
                hint = "; press again to stop at once" if at_terminal else ""
                print(f"stopping{hint}", file=sys.stderr, flush=True)
                crew.signal(interrupts.last)
                asked = True
                if not at_terminal:  # nobody is there to press anything
                    deadline = time.monotonic() + _GRACE
            if failure and deadline == math.inf:
                crew.signal(signal.SIGTERM)
            if deadline == math.inf and (failure or (asked and crew.left())):
                deadline = time.monotonic() + _GRACE  # nobody can go on without the others
            if interrupts.count > 1 or time.monotonic() > deadline:
                crew.signal(signal.SIGKILL)
    if asked:
        raise CommandError(f"stopped (logs in {logs})", 128 + interrupts.last)
    failure = crew.failure()
    if failure:
        rank, code = failure
        if rank:  # rank 0's output was seen
            _show_end(_log(logs, rank))
        raise CommandError(f"rank {rank} {_fate(code)} (logs in {logs})", _shell_code(code))


def search_path() -> str:
    """Where ranks look for commands: beside this Python first, as in its own environment."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


class _Crew:
    """The ranks of one run."""

    def __init__(
        self, place: Lab | Loopback, command: Sequence[str], port: int, logs: Path
    ) -> None:
        self._failure: tuple[int, int] | None = None
        self._copying: list[threading.Thread] = []
        self._ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(place.hosts):
            variables = {
                # What is printed is to be seen at once, and to be logged whatever comes.
                "PYTHONUNBUFFERED": "1",
                **os.environ,
                **place.environment(rank, port),
                "PATH": search_path(),
            }
            with open(_log(logs, rank), "wb", buffering=0) as log:
                output = log if rank else subprocess.PIPE
                self._ranks.append(
                    place.start(
                        rank,
                        command,
                        variables,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                    )
                )
        self._copy(self._ranks[0].stdout, sys.stdout.buffer, _log(logs, 0))
        self._copy(self._ranks[0].stderr, sys.stderr.buffer, _log(logs, 0))

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *error: object) -> None:
        for thread in self._copying:
            # Longer only if something that rank 0 started still has its output.
            thread.join(timeout=1)

    def working(self) -> bool:
        """Whether some rank still runs."""
        return any(rank.poll() is None for rank in self._ranks)

    def left(self) -> bool:
        """Whether some rank has ended."""
        return any(rank.poll() is not None for rank in self._ranks)

    def failure(self) -> tuple[int, int] | None:
        """The rank that failed first, the worst of them if several did, and its exit code."""
        if self._failure is None:
            codes = enumerate(rank.poll() for rank in self._ranks)
            failed = [(rank, code) for rank, code in codes if code]
            self._failure = max(failed, key=lambda one: _shell_code(one[1]), default=None)
        return self._failure

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank and to its children, as a terminal would."""
        for rank in self._ranks:
            if rank.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, number)

    def _copy(self, source: IO[bytes] | None, screen: IO[bytes], log: Path) -> None:
        assert source is not None
        thread = threading.Thread(target=_copy, args=(source, screen, log), daemon=True)
        thread.start()
        self._copying.append(thread)


def _copy(source: IO[bytes], screen: IO[bytes], log: Path) -> None:
    """Show and log what a rank prints, as it comes; log it even if nobody looks any more."""
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
