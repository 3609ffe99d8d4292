"""`sparsewire bench`: what training costs, measured in real processes on a network of its own."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..bench import contenders, page, picture, table
from ..bench.contenders import COMPUTE
from ..bench.plan import Plan, Turn, interleave
from ..bench.progress import Progress, choose
from ..bench.results import Contender, Results, Run, Sample, dumps, headlines, remarks, sample
from ..bench.setting import Setting
from ..lab import Lab, LabError, Link, Loopback, obstacle, parse_rate
from ..tasks import workloads
from ..tasks.workloads import WorkloadError
from .errors import USAGE, CommandError, explain_os_error
from .launcher import Job, WorkerError, launch
from .options import BenchStep
from .plan import check_hosts
from .records import Record
from .site import Site

_STARTING = 120.0  # seconds for all processes to start and to build the model


def step(options: BenchStep) -> int:
    """Measure training steps, print the table and write everything else."""
    names = _contenders(options)
    rates = _rates(options)
    _check(options)
    _make_folder(options.out)
    plan = Plan(
        model=options.model,
        batch_size=options.batch_size,
        turns=interleave(names, options.rounds),
        steps=options.steps,
        timeout=options.timeout,
        counts={},
    )
    runs, model = [], {}
    with choose(options.quiet, len(plan.turns) * len(rates)) as progress:
        for rate in rates:
            with _site(options, rate) as site:
                session = _Session(plan, names, progress, options.debug)
                runs.append(session.run(site, rate))
                model = {"name": options.model, **session.model}
    results = Results(Setting.here(_arguments(options)), model, options.hosts, tuple(runs))
    _write(options, results)
    return 0


class _Session:
    """Measures all contenders on one network, whatever becomes of some of them."""

    def __init__(self, plan: Plan, names: list[str], progress: Progress, debug: bool) -> None:
        self.model: dict[str, Any] = {}
        self._plan, self._progress, self._debug = plan, progress, debug
        self._samples: dict[str, list[Sample]] = {name: [] for name in names}
        self._failed: dict[str, str] = {}
        self._done: set[Turn] = set()
        self._turn: Turn | None = None
        self._heard = 0.0

    def run(self, site: Site, rate: int | None) -> Run:
        """Measure on `site`, with new processes after a contender has broken the old ones."""
        links: list[Link] = []
        if isinstance(site, Lab):
            network = "lab"
            self._progress.say("measuring the links")
            links = site.check()
        else:
            network = "loopback"
        self._progress.begin(Run(network, rate, tuple(links), ()).place)
        while turns := self._left():
            try:
                self._launch(site, turns)
            except WorkerError as error:
                if self._turn is None or self._turn[1] == COMPUTE:
                    raise
                self._fail(self._turn[1], str(error))
        found = tuple(
            Contender(name, tuple(samples), self._failed.get(name))
            for name, samples in self._samples.items()
        )
        return Run(network, rate, tuple(links), found)

    def _launch(self, site: Site, turns: tuple[Turn, ...]) -> None:
        self._turn, self._heard = None, time.monotonic()
        plan = replace(self._plan, turns=turns, counts=self._counts())
        job = Job("sparsewire.cli.timekeeper", plan.to_dict(), stops_gently=False)
        launch(job, site, self._hear, debug=self._debug, overdue=self._overdue)

    def _left(self) -> tuple[Turn, ...]:
        """The turns that are still to be taken, none if nobody but compute is left."""
        return tuple(
            turn
            for turn in self._plan.turns
            if turn not in self._done and turn[1] not in self._failed
        )

    def _counts(self) -> dict[str, int]:
        """How many steps a turn of each has, as the first one decided."""
        return {
            name: sum(sample.round == samples[0].round for sample in samples)
            for name, samples in self._samples.items()
            if samples
        }

    def _hear(self, record: Record) -> None:
        self._heard = time.monotonic()
        kind = record["record"]
        if kind == "opening":
            self.model = {k: v for k, v in record.items() if k != "record"}
        elif kind == "turn":
            self._turn = (record["round"], record["contender"])
            self._progress.turn(*self._turn)
        elif kind == "step":
            self._progress.step(record["seconds"])
        elif kind == "measured":
            turn = (record["round"], record["contender"])
            self._samples[turn[1]] += [sample({**s, "round": turn[0]}) for s in record["steps"]]
            self._done.add(turn)
            self._progress.done()
        elif kind == "failed":
            self._fail(record["contender"], record["reason"])

    def _fail(self, name: str, reason: str) -> None:
        missed = sum(turn not in self._done for turn in self._plan.turns if turn[1] == name)
        self._failed[name] = reason
        self._progress.failed(name, reason, missed)

    def _overdue(self) -> str | None:
        silence = time.monotonic() - self._heard
        if self._turn is None:
            limit = max(_STARTING, self._plan.timeout)
            return f"the workers did not start within {limit:g} s" if silence > limit else None
        if silence > self._plan.timeout:
            return f"no step came to its end for {self._plan.timeout:g} s: it hangs, or needs more"
        return None


def _contenders(options: BenchStep) -> list[str]:
    """Everybody by the names of the table, the floor first; given twice counts once."""
    peers = [contenders.peer(text) for text in options.peers]
    schemes = [contenders.scheme(text) for text in options.schemes]
    if not peers and not schemes:
        raise CommandError("there is nothing to measure: name --schemes or --peers", USAGE)
    return list(dict.fromkeys([COMPUTE, *peers, *schemes]))


def _rates(options: BenchStep) -> list[int | None]:
    """The rate of each network, None for unshaped links."""
    if options.loopback:
        return [None]
    if not options.rates:
        raise CommandError("--rates needs at least one rate, like 1gbit or none", USAGE)
    rates: list[int | None] = []
    for text in options.rates:
        try:
            rates.append(None if text.lower() == "none" else parse_rate(text))
        except LabError as error:
            raise CommandError(f"--rates: {error}", USAGE) from None
    return list(dict.fromkeys(rates))


def _check(options: BenchStep) -> None:
    """Refuse what cannot work before anything starts, each with what would."""
    check_hosts(options.hosts, "--hosts")
    rules = [
        (options.hosts >= 2, "--hosts must be at least 2: one alone exchanges nothing"),
        (options.batch_size is None or options.batch_size >= 1, "--batch-size must be at least 1"),
        (options.rounds >= 1, f"--rounds must be at least 1, not {options.rounds}"),
        (options.steps >= 2, f"--steps must be at least 2, not {options.steps}"),
        (0 < options.timeout < 86400, "--timeout must be in seconds, more than 0, up to a day"),
    ]
    for holds, sentence in rules:
        if not holds:
            raise CommandError(sentence, USAGE)
    try:
        workloads.check(options.model)
    except WorkloadError as error:
        raise CommandError(str(error), USAGE) from error
    why_not = None if options.loopback else obstacle()
    if why_not:
        raise CommandError(f"{why_not}; or add --loopback to measure without a network of its own")


def _site(options: BenchStep, rate: int | None) -> Site:
    if options.loopback:
        return Loopback(options.hosts)
    return Lab(options.hosts, None if rate is None else f"{rate}bit")


def _arguments(options: BenchStep) -> dict[str, Any]:
    return {name: str(v) if isinstance(v, Path) else v for name, v in asdict(options).items()}


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, "write results to") from None


def _write(options: BenchStep, results: Results) -> None:
    """Write all files, and print the table or the JSON."""
    out = options.out
    try:
        results.write(out / "results.json")
        picture.save(results, out / "step.png", out / "step.svg")
        page.save(results, out / "report.html")
    except OSError as error:
        raise explain_os_error(error, "write results to") from None
    if options.json:
        print(dumps(results.to_dict()), end="")
        return
    console = Console()
    for run, headline in zip(results.runs, headlines(results), strict=True):
        console.print(*table.build(results, run), sep="\n")
        for sentence in (headline, *remarks(run)):
            console.print(sentence, markup=False, highlight=False)
        console.print()
    console.print(f"report: {out / 'report.html'}", markup=False, highlight=False, soft_wrap=True)
