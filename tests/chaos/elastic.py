"""Elastic training: agents of `torchrun --nnodes 1:4` are killed and come back, again and again.

    python -m tests.chaos.elastic --rounds 10 --seed 1 [--out FOLDER]

The rendezvous is in this process, so that any agent can be killed. A seed decides who is killed
and when: agents with their ranks, or only ranks, which their agents start anew.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ..patience import patience
from .stage import ROOT

MOST = 4
MORE = 300  # steps that all ranks know of the end in advance
PROGRESS = 25  # steps in a row that count as training on
CONSERVED = 1e-6


@dataclass(frozen=True)
class Round:
    """One kill, and what followed.

    Arguments:
        killed: how many agents or ranks.
        whole: whether agents were killed, or only their ranks.
        worlds: the number of ranks before the kill, after it, and after others have joined.
        lost: how far the mean residual was changed by going on, as a share of its norm.
        seconds: from the kill until the others had trained on for a while.
    """

    killed: int
    whole: bool
    worlds: tuple[int, ...]
    lost: float
    seconds: float


class Job:
    """A job of agents that come and go; a context."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sparsewire-elastic-"))
        self._count = 0
        self._store: Any = None
        self.agents: list[subprocess.Popen[bytes]] = []
        self.events: list[dict[str, Any]] = []
        self._places: dict[Path, int] = {}

    def __enter__(self) -> Job:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for agent in self.agents:
            self._kill(agent)
        if error is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            print(f"what the agents wrote is in {self.folder}", file=sys.stderr)

    def start(self, count: int) -> None:
        """Start so many more agents, and wait until all train together."""
        since = len(self.events)
        for _ in range(count):
            self._start()
        self._wait_for_progress(since)

    def _start(self) -> None:
        rendezvous = {
            "is_host": 0,
            "join_timeout": int(patience(60)),
            "last_call_timeout": int(patience(2)),
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": int(patience(3)),
        }
        words = [
            *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run"),
            *("--nnodes", f"1:{MOST}", "--nproc-per-node", "1"),
            *("--rdzv-backend", "c10d", "--rdzv-id", "elastic"),
            *("--rdzv-endpoint", f"127.0.0.1:{self._store.port}"),
            *("--rdzv-conf", ",".join(f"{key}={value}" for key, value in rendezvous.items())),
            *("--max-restarts", "1000", "--monitor-interval", "0.1", "--local-addr", "127.0.0.1"),
            *("--log-dir", str(self.folder / "logs")),  # which killed agents leave behind
            *("-m", "tests.chaos.elastic_worker", str(self.folder)),
        ]
        with (self.folder / f"agent-{self._count}.log").open("wb") as log:
            agent = subprocess.Popen(
                words,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                    "RES_OPTIONS": "timeout:1 attempts:1",
                },
            )
        self.agents.append(agent)
        self._count += 1

    def lose(self, victims: Sequence[subprocess.Popen[bytes]], whole: bool) -> None:
        """Kill agents, or their ranks alone, and wait until the others train on.

        A rank dies with its agent, which starts another one if only the rank is killed.
        """
        since = len(self.events)
        for agent in list(victims):
            if whole:
                self._kill(agent)
                self.agents.remove(agent)
            else:
                self._kill_rank(agent)
        self._wait_for_progress(since)

    @staticmethod
    def _kill_rank(agent: subprocess.Popen[bytes]) -> None:
        words = ["pgrep", "-P", str(agent.pid)]
        children = subprocess.run(words, capture_output=True, text=True, check=False)
        for pid in children.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    @staticmethod
    def _kill(agent: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()

    def pump(self) -> None:
        """Read what the ranks have written."""
        for path in self.folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._places.get(path, 0))
                came = file.read()
            whole = came[: came.rfind(b"\n") + 1]
            self._places[path] = self._places.get(path, 0) + len(whole)
            self.events += map(json.loads, whole.splitlines())

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Wait until it is so; everything here should happen within a minute."""
        end = time.monotonic() + patience(60)
        while not condition():
            gone = [agent.poll() for agent in self.agents if agent.poll() is not None]
            if gone and not any(each["event"] == "done" for each in self.events):
                raise RuntimeError(f"agents ended with {gone} while waiting for {what}")
            if time.monotonic() > end:
                raise RuntimeError(f"waited in vain for {what}: {self.events[-8:]}")
            time.sleep(0.05)
            self.pump()

    def finish(self) -> list[dict[str, Any]]:
        """Let the ranks train to an end, and return what they say there."""
        last = max(each["n"] for each in self.events if each["event"] == "saved") + MORE
        beside = self.folder / ".steps"
        beside.write_text(str(last))
        beside.replace(self.folder / "steps")
        self.wait_for(lambda: all(agent.poll() is not None for agent in self.agents), "the end")
        self.pump()
        return [each for each in self.events if each["event"] == "done"]

    def _wait_for_progress(self, since: int) -> None:
        """Wait until as many ranks as there are agents train together."""
        world = len(self.agents)
        self.wait_for(lambda: self._trains(world, since), f"{world} ranks to train on")

    def _trains(self, world: int, since: int) -> bool:
        """Whether so many ranks have gone on together, and saved, after event number `since`."""
        news = [each for each in self.events[since:] if each.get("world") == world]
        resumed = [each["n"] for each in news if each["event"] == "resumed"]
        saved = [each["n"] for each in news if each["event"] == "saved"]
        return bool(resumed and saved) and max(saved) >= max(resumed) + PROGRESS


def play(rounds: int, seed: int) -> list[Round]:
    """Kill and let rejoin so many times; raises if training does not go on."""
    chance, results = random.Random(seed), []
    with Job() as job:
        job.start(chance.choice([2, 3, 4]))
        for _ in range(rounds):
            results.append(_play_round(job, chance))
            print(json.dumps(asdict(results[-1])), flush=True)
            if results[-1].lost > CONSERVED:
                raise RuntimeError(f"the mean residual changed by {results[-1].lost:.1e}")
    return results


def _play_round(job: Job, chance: random.Random) -> Round:
    since, began, worlds = len(job.events), time.monotonic(), [len(job.agents)]
    is_whole = len(job.agents) > 1 and chance.random() < 0.7
    most = len(job.agents) - 1 if is_whole else len(job.agents)
    victims = chance.sample(job.agents, chance.randint(1, most))
    time.sleep(chance.random() * 0.5)
    job.lose(victims, is_whole)
    seconds = time.monotonic() - began
    worlds.append(len(job.agents))
    if len(job.agents) < MOST:
        job.start(chance.randint(1, MOST - len(job.agents)))
        worlds.append(len(job.agents))
    lost = max(each["lost"] for each in job.events[since:] if each["event"] == "resumed")
    return Round(len(victims), is_whole, tuple(worlds), lost, round(seconds, 1))


def finish(worlds: Sequence[int]) -> tuple[int, float, float]:
    """Train to an end with ever other numbers of ranks.

    Returns the number of steps, the loss, and how far the mean residual was changed.
    """
    with Job() as job:
        for world in worlds:
            if world > len(job.agents):
                job.start(world - len(job.agents))
            elif world < len(job.agents):
                job.lose(job.agents[world:], whole=True)
        done = job.finish()
        codes = [agent.returncode for agent in job.agents]
        if len(done) != worlds[-1] or len({each["weights"] for each in done}) != 1 or any(codes):
            raise RuntimeError(f"ranks ended with codes {codes} and {done}")
        lost = max(each["lost"] for each in job.events if each["event"] == "resumed")
        return int(done[0]["n"]), float(done[0]["loss"]), lost


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.elastic", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="kills, each followed by a rejoin")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where elastic.json goes")
    options = parser.parse_args()
    results = play(options.rounds, options.seed)
    worst = max(each.lost for each in results)
    print(f"{len(results)} of {options.rounds} rounds: training went on after every kill and every")
    print(f"rejoin, and the mean residual kept all but {worst:.0e} of its norm")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        content = {"seed": options.seed, "rounds": [asdict(each) for each in results]}
        (options.out / "elastic.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
