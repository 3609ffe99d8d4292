"""`sparsewire bench train`: how long training takes to a target, dense and sparse."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from rich.console import Console

from sparsewire.report import plural

from ..bench.race import page, picture, table
from ..bench.race.plan import LEARNING_RATES, USUAL, Plan
from ..bench.race.progress import Progress, choose
from ..bench.race.results import Point, Race, Runner, headline, remarks
from ..bench.race.tasks import GOALS
from ..bench.results import dumps, place_in_words, say_seconds
from ..bench.setting import Setting
from ..lab import Lab, Link
from ..tasks import mnist, text
from .errors import USAGE, CommandError, explain_os_error
from .launcher import WorkerError, launch
from .measuring import (
    STARTING,
    arguments,
    check_place,
    make_folder,
    name_contenders,
    place,
    read_rate,
)
from .options import BenchTrain
from .plan import check_hosts
from .records import Record
from .site import Site


def train(options: BenchTrain, command: str = "sparsewire bench train") -> int:
    """Race to the target, print the table and write everything else.

    Args:
        command: what was typed, for the report.
    """
    usual = USUAL[options.model]
    schemes = usual.schemes if options.schemes is None else options.schemes
    names = name_contenders(options.peers, schemes)
    rate = None if options.loopback else read_rate(options.rate, "--rate")
    _check(options)
    optimizer = options.optimizer or usual.optimizer
    data = (mnist.find if options.model == "mnist" else text.find)(options.data)
    plan = Plan(
        model=options.model,
        contenders=tuple(names),
        target=usual.target if options.target is None else options.target,
        batch_size=options.batch_size or usual.batch_size,
        hidden=options.hidden or usual.hidden,
        optimizer=optimizer,
        lr=LEARNING_RATES[optimizer] if options.lr is None else options.lr,
        evaluate_every=options.evaluate_every,
        limit_steps=options.limit_steps or usual.limit_steps,
        seed=options.seed,
        data=str(data.resolve()),
        timeout=options.timeout,
    )
    make_folder(options.out)
    with (
        choose(options.quiet, plan.limit_steps, GOALS[plan.model]) as progress,
        place(options.hosts, rate, options.loopback) as site,
    ):
        session = _Session(plan, progress, options.debug)
        given = {**plan.to_dict(), "data": options.data and str(options.data)}
        given = {**arguments(command, options), **given}
        race = session.run(site, rate, Setting.here(given))
    _write(options, race)
    return 0


class _Session:
    """Has all contenders train on one network, whatever becomes of some of them."""

    def __init__(self, plan: Plan, progress: Progress, debug: bool) -> None:
        self._plan, self._progress, self._debug = plan, progress, debug
        self._model: Record = {}
        self._points: dict[str, list[Point]] = {}
        self._failed: dict[str, str] = {}
        self._through: set[str] = set()
        self._at_work: str | None = None
        self._heard = 0.0

    def run(self, site: Site, rate: int | None, setting: Setting) -> Race:
        """Train on `site`, with new processes after a contender has broken the old ones."""
        links: list[Link] = []
        network = "lab" if isinstance(site, Lab) else "loopback"
        if isinstance(site, Lab):
            self._progress.say("measuring the links")
            links = site.check()
        self._progress.say(f"{site.hosts} hosts {place_in_words(network, rate)}: starting")
        while left := tuple(n for n in self._plan.contenders if n not in self._through):
            try:
                self._launch(site, left)
            except WorkerError as error:
                if self._at_work is None:
                    raise
                self._end(self._at_work, str(error))
        score = self._model.pop("score")
        return Race(
            setting=setting,
            model={"name": self._plan.model, **self._model},
            hosts=site.hosts,
            network=network,
            rate=rate,
            links=tuple(links),
            target=self._plan.target,
            limit_steps=self._plan.limit_steps,
            runners=tuple(
                Runner(
                    name,
                    (Point(0, 0.0, score), *self._points.get(name, ())),
                    self._failed.get(name),
                )
                for name in self._plan.contenders
            ),
        )

    def _launch(self, site: Site, contenders: tuple[str, ...]) -> None:
        self._at_work, self._heard = None, time.monotonic()
        plan = replace(self._plan, contenders=contenders)
        orders = plan.to_dict()
        launch("race", orders, site, self._hear, debug=self._debug, overdue=self._overdue)

    def _hear(self, record: Record) -> None:
        self._heard = time.monotonic()
        kind = record.pop("record")
        if kind == "opening":
            self._model = record
        elif kind == "contender":
            self._at_work = name = record["contender"]
            self._points[name] = []
            self._progress.begin(name, self._model["score"])
        elif kind == "step":
            self._progress.step(record["step"], record["seconds"])
        elif kind == "point":
            point = Point(**{key: v for key, v in record.items() if key != "contender"})
            self._points[record["contender"]].append(point)
            self._progress.point(point.score, point.seconds)
        elif kind == "finished":
            self._end(record["contender"], None)
        elif kind == "failed":
            self._end(record["contender"], record["reason"])

    def _end(self, name: str, failure: str | None) -> None:
        self._through.add(name)
        if failure is not None:
            self._failed[name] = failure
            self._progress.done(name, f"failed: {failure}")
            return
        last = self._points[name][-1]
        if GOALS[self._plan.model].reached(last.score, self._plan.target):
            outcome = f"got there in {say_seconds(last.seconds)}, {plural(last.step, 'step')}"
        else:
            outcome = f"did not get there in {plural(last.step, 'step')}"
        self._progress.done(name, outcome)

    def _overdue(self) -> str | None:
        silence = time.monotonic() - self._heard
        limit = max(STARTING, self._plan.timeout)  # a look at the test set is silent too
        if silence <= limit:
            return None
        if self._at_work is None:
            return f"the workers did not start within {limit:g} s"
        return f"no step came to its end for {limit:g} s: it hangs, or needs more"


def _check(options: BenchTrain) -> None:
    """Refuse what cannot work before anything starts, each with what would."""
    check_hosts(options.hosts, "--hosts")
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
    check_place(options.loopback)


def _write(options: BenchTrain, race: Race) -> None:
    """Write all files, and print the table or the JSON."""
    out, content = options.out, dumps(race.to_dict())
    try:
        (out / "results.json").write_text(content, encoding="utf-8")
        picture.save(race, out / "train.png", out / "train.svg")
        page.save(race, out / "report.html")
    except OSError as error:
        raise explain_os_error(error, "write results to") from None
    if options.json:
        print(content, end="")
        return
    console = Console()
    console.print(table.build(race))
    for sentence in (headline(race), *remarks(race)):
        console.print(sentence, markup=False, highlight=False)
    console.print(f"report: {out / 'report.html'}", markup=False, highlight=False, soft_wrap=True)
