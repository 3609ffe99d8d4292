"""`sparsewire bench step`: what a training step costs, measured in real processes.

The columns of its tables are in `bench/step/columns.py`.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, replace
from typing import Any

from ..bench.contenders import COMPUTE
from ..bench.results import Contender, Results, Sample
from ..bench.setting import Setting, arguments
from ..bench.step.rank import Plan, Turn, interleave
from ..bench.words import say_seconds
from ..tasks import workloads
from . import site
from .bench_session import Session, name_contenders, prepare, tell
from .options import BenchScale, BenchStep
from .progress import Progress
from .worker import Record


def step(options: BenchStep) -> int:
    """Measure training steps, print the table and write all files."""
    names = [COMPUTE, *name_contenders(options.peers, options.schemes)]
    rates = dict.fromkeys(site.read_rate(text, "--rates") for text in options.rates)
    site.check_hosts(options.hosts, "--hosts")
    workloads.check(options.model)
    prepare(options)
    plan = plan_of(options, names)
    runs, model = [], {}
    with Progress(options.quiet) as shown:
        for rate in [None] if options.loopback else rates:
            with site.choose(options.hosts, rate, options.loopback) as place:
                session = StepSession(plan, names, shown, options.debug)
                runs.append(session.run(place, rate))
                model = {"name": options.model, **session.model}
    setting = Setting.here(arguments("sparsewire bench step", options))
    tell(Results("step", setting, model, tuple(runs)), options)
    return 0


def plan_of(options: BenchStep | BenchScale, names: list[str]) -> Plan:
    """Return the workers' plan."""
    return Plan(
        model=options.model,
        batch_size=options.batch_size,
        turns=interleave(names, options.rounds),
        steps=options.steps,
        timeout=options.timeout,
        counts={},
    )


class StepSession(Session):
    """Has all contenders take turns on one network, each of a few steps."""

    work = "measure"

    def __init__(self, plan: Plan, names: list[str], shown: Progress, debug: bool) -> None:
        super().__init__(len(plan.turns), plan.timeout, shown, debug)
        self.buckets: dict[str, list[dict[str, list[int]]]] = {}  # by contender, as DDP cut them
        self._plan = plan
        self._samples: dict[str, list[Sample]] = {name: [] for name in names}
        self._done: set[Turn] = set()
        self._seconds: list[float] = []  # of the steps of this turn

    def contenders(self) -> tuple[Contender, ...]:
        """Return the samples of all contenders."""
        return tuple(
            Contender(name, tuple(samples), failed=self.failed.get(name))
            for name, samples in self._samples.items()
        )

    def left(self) -> dict[str, Any] | None:
        """Return the plan for the remaining turns, with as many steps as before."""
        turns = tuple(
            turn
            for turn in self._plan.turns
            if turn not in self._done and turn[1] not in self.failed
        )
        counts = {
            name: sum(sample.round == samples[0].round for sample in samples)
            for name, samples in self._samples.items()
            if samples
        }
        return asdict(replace(self._plan, turns=turns, counts=counts)) if turns else None

    def hear(self, record: Record) -> None:
        """Follow a turn."""
        if record["kind"] == "step":
            self._seconds.append(record["seconds"])
            self.progress.update(len(self._done), f"{say_seconds(record['seconds'])}/step")
            return
        turn: Turn = (record["round"], record["contender"])
        if record["kind"] == "turn":
            self._seconds = []
            title = f"{self.place}, round {turn[0] + 1}: {turn[1]}"
            self.progress.update(len(self._done), "", title)
        elif record["kind"] == "measured":
            self._samples[turn[1]] += [Sample(round=turn[0], **step) for step in record["steps"]]
            self.buckets[turn[1]] = record["buckets"]
            self._done.add(turn)
            self.progress.log(
                f"  {len(self._done)}/{len(self._plan.turns)}  round {turn[0] + 1}  {turn[1]}  "
                f"{say_seconds(statistics.median(self._seconds))}/step"
            )
