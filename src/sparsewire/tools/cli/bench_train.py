"""`sparsewire bench train` and `demo`: how long training takes to a target, dense and sparse.

The columns of its table are in `bench/train/columns.py`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

from sparsewire.report import plural

from ..bench.results import Contender, Point, Results
from ..bench.setting import Setting, arguments
from ..bench.train.plan import GOALS, LEARNING_RATES, MOMENTUM, USUAL, WARM_UP, Plan
from ..bench.words import say_seconds
from ..tasks import mnist, text
from . import site
from .bench_session import Session, name_contenders, prepare, tell
from .errors import USAGE, CommandError
from .options import BenchTrain
from .progress import Progress
from .worker import Record


def train(options: BenchTrain) -> int:
    """Train to the target, print the table and write all files."""
    tell(run(options, "sparsewire bench train"), options)
    return 0


def run(options: BenchTrain, command: str) -> Results:
    """Train with all contenders, one after the other; `command` is recorded with the results."""
    plan = _plan(options)
    rate = None if options.loopback else site.read_rate(options.rate)
    _check(options)
    prepare(options)
    given = arguments(command, options)
    chosen = {name: value for name, value in asdict(plan).items() if name in given}
    chosen |= {"contenders": plan.contenders, "data": given["data"]}
    setting = Setting.here({**given, **chosen})
    with (
        Progress(options.quiet) as shown,
        site.choose(options.hosts, rate, options.loopback) as place,
    ):
        session = _Session(plan, shown, options.debug)
        found = session.run(place, rate)
    model = {"name": plan.model, **session.model}
    facts = {"target": plan.target, "limit_steps": plan.limit_steps}
    return Results("train", setting, model, (found,), facts)


def _plan(options: BenchTrain) -> Plan:
    """Return the workers' plan: the options given, and the model's defaults for the rest."""
    usual = USUAL[options.model]
    optimizer = options.optimizer or usual.optimizer
    data = (mnist.find if options.model == "mnist" else text.find)(options.data)
    schemes = usual.schemes if options.schemes is None else options.schemes
    return Plan(
        model=options.model,
        contenders=tuple(name_contenders(options.peers, schemes)),
        target=usual.target if options.target is None else options.target,
        batch_size=options.batch_size or usual.batch_size,
        hidden=options.hidden or usual.hidden,
        optimizer=optimizer,
        lr=LEARNING_RATES[optimizer] if options.lr is None else options.lr,
        momentum=MOMENTUM if optimizer == "sgd" else 0.0,
        warm_up=WARM_UP if optimizer == "adamw" else 0,
        evaluate_every=options.evaluate_every,
        limit_steps=options.limit_steps or usual.limit_steps,
        seed=options.seed,
        data=str(data.resolve()),
        timeout=options.timeout,
    )


def _check(options: BenchTrain) -> None:
    """Raise an error for options that cannot work, before anything starts."""
    site.check_hosts(options.hosts, "--hosts")
    target, is_share = options.target, options.model == "mnist"
    if target is not None and not 0 < target < (1 if is_share else math.inf):
        wanted = "between 0 and 1" if is_share else "above 0"
        raise CommandError(f"--target must be {wanted}, not {target}", USAGE)
    if options.model == "gpt" and (
        len({*options.hidden}) > 1 or any(width % 32 for width in options.hidden)
    ):
        raise CommandError(
            "--hidden widths of gpt must be alike, one for each layer, and multiples of 32", USAGE
        )


class _Session(Session):
    """Has all contenders train on one network."""

    work = "race"

    def __init__(self, plan: Plan, shown: Progress, debug: bool) -> None:
        # Tests send no records.
        super().__init__(plan.limit_steps, max(plan.timeout, 120.0), shown, debug)
        self._plan, self._goal = plan, GOALS[plan.model]
        self._points: dict[str, list[Point]] = {name: [] for name in plan.contenders}
        self._finished: set[str] = set()

    def contenders(self) -> tuple[Contender, ...]:
        """Return the points of all contenders; the first is the same for all."""
        first = Point(0, 0.0, self.model.pop("score"))
        return tuple(
            Contender(name, points=(first, *points), failed=self.failed.get(name))
            for name, points in self._points.items()
        )

    def left(self) -> dict[str, Any] | None:
        """Return the plan for the remaining contenders."""
        names = [name for name in self._points if name not in {*self._finished, *self.failed}]
        return asdict(replace(self._plan, contenders=tuple(names))) if names else None

    def hear(self, record: Record) -> None:
        """Follow one contender."""
        name = str(self.at_work)
        points = self._points[name]
        match record.pop("kind"):
            case "contender":
                points.clear()
                self.progress.begin(name, self._plan.limit_steps)
            case "step":
                score = points[-1].score if points else self.model["score"]
                told = f"{self._goal.shown(score)}  {say_seconds(record['seconds'])}"
                self.progress.update(record["step"], told)
            case "point":
                point = Point(**{key: v for key, v in record.items() if key != "contender"})
                points.append(point)
                told = f"{self._goal.shown(point.score)}  {say_seconds(point.seconds)}"
                self.progress.log(f"  step {point.step}  {told}")
            case "finished":
                self._finished.add(name)
                last = points[-1]
                if self._goal.reached(last.score, self._plan.target):
                    outcome = f"reached the target in {say_seconds(last.seconds)}"
                else:
                    outcome = "did not reach the target"
                self.progress.keep(f"{name}: {outcome}, {plural(last.step, 'step')}")
