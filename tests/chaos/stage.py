"""One run of a training: its ranks, its store and its network, which all go when it is over."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

from sparsewire.tools.lab import Lab

from ..patience import patience
from .trials import Trial

ROOT = Path(__file__).parents[2]
LIMIT = 60.0  # seconds for anything that should happen at all, on an idle machine


class End(NamedTuple):
    """How a process ended: its exit code, negative for a signal, and when."""

    code: int
    time: float


class Zygote:
    """The process from which ranks are forked.

    Arguments:
        disk: a folder for a small disk of its own, and its size in bytes.
    """

    def __init__(self, disk: tuple[Path, int] | None = None) -> None:
        words = [sys.executable, "-W", "ignore", "-m", "tests.chaos.zygote", *map(str, disk or ())]
        self._process = subprocess.Popen(
            words,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RES_OPTIONS": "timeout:1 attempts:1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # a warning looks up a stack, which takes long
            },
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._waiting, self._started = b"", list[int]()
        self.is_ready = False
        self.ends: dict[int, End] = {}
        self._until(lambda: self.is_ready)

    def fork(self, task: Mapping[str, Any]) -> int:
        """Start a process, and return its number."""
        os.write(self._in, (json.dumps(task) + "\n").encode())
        self._until(lambda: self._started)
        return self._started.pop()

    def pump(self, seconds: float) -> None:
        """Hear what became of processes, waiting for at most so long."""
        if not select.select([self._out], [], [], seconds)[0]:
            return
        came = os.read(self._out, 1 << 16)
        if not came:
            raise RuntimeError(f"the zygote ended with code {self._process.wait()}")
        *lines, self._waiting = (self._waiting + came).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "started" in said:
                self._started.append(said["started"])
            elif "ended" in said:
                self.ends[said["ended"]] = End(said["code"], said["time"])
            else:
                self.is_ready = True

    def _until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + patience(LIMIT)
        while not condition():
            if time.monotonic() > end:
                raise RuntimeError("the zygote does not answer")
            self.pump(0.1)

    def close(self) -> None:
        """End it, and with it everything that it has forked."""
        self._process.kill()
        self._process.communicate()


class Setting(TypedDict, total=False):
    """How a run differs from the usual.

    Arguments:
        faulty: whether the trial's fault happens in this run, as it does if left out.
        gate: the step before which ranks wait until `open_gate` is called.
        saves: whether checkpoints are written.
        resumes: 'checked' goes on from the newest checkpoint, 'raw' without its manifest.
        lab: the hosts that ranks live on; this machine's loopback if left out.
    """

    faulty: bool
    gate: int
    saves: bool
    resumes: str
    lab: Lab


class Stage:
    """One run of one trial.

    Arguments:
        folder: what the ranks of this run write.
        disk: what checkpoints are written to.
        steps: how many steps the ranks train.
        setting: see `Setting`.
    """

    def __init__(
        self,
        trial: Trial,
        zygote: Zygote,
        folder: Path,
        disk: Path,
        steps: int,
        **setting: Unpack[Setting],
    ) -> None:
        lab = setting.get("lab")
        self.trial, self.folder = trial, folder
        self._zygote, self._lab = zygote, lab
        self.limit = patience(LIMIT)
        self._task = {
            "trial": trial.to_dict(),
            "folder": str(folder),
            "disk": str(disk),
            "steps": steps,
            "faulty": setting.get("faulty", True),
            "gate": setting.get("gate", -1),
            "saves": setting.get("saves", False),
            "resumes": setting.get("resumes"),
            "limit": self.limit,
            "address": lab.addresses[0] if lab else "127.0.0.1",
            "interface": "eth0" if lab else "lo",
        }
        self.pids: list[int] = []
        self.agent: int | None = None
        self.events: dict[str, list[dict[str, Any]]] = {}
        self._places: dict[str, int] = {}

    def __enter__(self) -> Stage:
        self.folder.mkdir()
        try:
            port, first = 0, 0
            if self.trial.host == "agent":
                self.agent = self._start("agent", 0, 0)
                port = self._port("agent")
            else:
                self.pids.append(self._start("rank", 0, 0))
                port, first = self._port("rank-0"), 1
            for rank in range(first, self.trial.world):
                self.pids.append(self._start("rank", rank, port))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs, whatever state it is in."""
        everyone = [*self.pids, *([self.agent] if self.agent else [])]
        for pid in everyone:
            self._kill(pid, signal.SIGKILL)
        self.wait_for(lambda: all(pid in self._zygote.ends for pid in everyone))

    def _start(self, role: str, rank: int, port: int) -> int:
        namespace = f"sparsewire-{self._lab.id}-host{rank}" if self._lab else None
        name = "agent" if role == "agent" else f"rank-{rank}"
        log = str(self.folder / f"{name}.log")
        own = {"role": role, "rank": rank, "port": port, "namespace": namespace, "log": log}
        return self._zygote.fork({**self._task, **own})

    def _port(self, name: str) -> int:
        def known() -> bool:
            return self.find(name, "port") is not None

        if not self.wait_for(known):
            raise RuntimeError(f"{name} has no port: {self.log(name)}")
        found = self.find(name, "port")
        assert found is not None
        return int(found["port"])

    # -- what the ranks say ----------------------------------------------------------------------

    def pump(self) -> None:
        """Read what ranks have written, and how they ended."""
        self._zygote.pump(0.005)
        for path in self.folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._places.get(path.stem, 0))
                came = file.read()
            whole = came[: came.rfind(b"\n") + 1]
            self._places[path.stem] = self._places.get(path.stem, 0) + len(whole)
            self.events.setdefault(path.stem, []).extend(map(json.loads, whole.splitlines()))

    def wait_for(self, condition: Callable[[], object], seconds: float | None = None) -> bool:
        """Whether `condition` comes true in time."""
        end = time.monotonic() + (self.limit if seconds is None else seconds)
        while not condition():
            if time.monotonic() > end:
                return False
            self.pump()
        return True

    def find(self, who: int | str, event: str) -> dict[str, Any] | None:
        """The last event of a kind that a rank wrote down."""
        name = f"rank-{who}" if isinstance(who, int) else who
        return next((e for e in reversed(self.events.get(name, [])) if e["event"] == event), None)

    def all_of(self, rank: int, event: str) -> list[dict[str, Any]]:
        """All events of a kind that a rank wrote down."""
        return [each for each in self.events.get(f"rank-{rank}", []) if each["event"] == event]

    def end(self, rank: int) -> End | None:
        """How a rank ended, if it has."""
        return self._zygote.ends.get(self.pids[rank])

    def has_ended(self, *ranks: int) -> bool:
        """Whether all of these ranks have ended."""
        return all(self.end(rank) is not None for rank in ranks)

    def log(self, who: int | str) -> str:
        """The end of what a rank printed."""
        path = self.folder / f"{f'rank-{who}' if isinstance(who, int) else who}.log"
        return path.read_text(errors="replace")[-1500:] if path.exists() else ""

    # -- what is done to them --------------------------------------------------------------------

    def begin(self) -> bool:
        """Let the ranks go once all are ready to attach."""
        everyone = range(self.trial.world)
        is_ready = self.wait_for(lambda: all(self.find(rank, "ready") for rank in everyone))
        (self.folder / "go").touch()
        return is_ready

    def open_gate(self) -> None:
        """Let the ranks past the gate."""
        (self.folder / "over").touch()

    def reach(self, rank: int, event: str = "at") -> bool:
        """Wait until a rank is where the fault happens, and some hundredths of a second more."""
        came = self.wait_for(lambda: self.find(rank, event) or self.has_ended(rank))
        time.sleep(self.trial.delay)
        return came and not self.has_ended(rank)

    def strike(self, rank: int, number: int) -> float:
        """Send a signal to a rank, and return when."""
        self._kill(self.pids[rank], number)
        return time.monotonic()

    def strike_agent(self, number: int) -> float:
        """Send a signal to the process that hosts the store, and return when."""
        assert self.agent is not None
        self._kill(self.agent, number)
        return time.monotonic()

    def _kill(self, pid: int, number: int) -> None:
        if pid not in self._zygote.ends:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def ip(self, place: str, *words: str) -> None:
        """Change the network of one host of the lab, or of the switch."""
        assert self._lab is not None
        subprocess.run(["ip", "-n", f"sparsewire-{self._lab.id}-{place}", *words], check=True)
