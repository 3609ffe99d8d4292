"""`sparsewire bench`: what training costs, measured in real processes on a network of its own."""

from __future__ import annotations

from rich.console import Console

from ..bench import page, picture, table
from ..bench.contenders import COMPUTE
from ..bench.plan import Plan, interleave
from ..bench.progress import choose
from ..bench.results import Results, dumps, headlines, remarks
from ..bench.setting import Setting
from ..tasks import workloads
from ..tasks.workloads import WorkloadError
from .errors import USAGE, CommandError, explain_os_error
from .measuring import (
    Session,
    arguments,
    check_place,
    make_folder,
    name_contenders,
    place,
    read_rate,
)
from .options import BenchStep
from .plan import check_hosts


def step(options: BenchStep) -> int:
    """Measure training steps, print the table and write everything else."""
    names = [COMPUTE, *name_contenders(options.peers, options.schemes)]
    rates = _rates(options)
    _check(options)
    make_folder(options.out)
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
            with place(options.hosts, rate, options.loopback) as site:
                session = Session(plan, names, progress, options.debug)
                runs.append(session.run(site, rate))
                model = {"name": options.model, **session.model}
    setting = Setting.here(arguments("sparsewire bench step", options))
    results = Results(setting, model, options.hosts, tuple(runs))
    _write(options, results)
    return 0


def _rates(options: BenchStep) -> list[int | None]:
    """The rate of each network, None for unshaped links."""
    if options.loopback:
        return [None]
    return list(dict.fromkeys(read_rate(text, "--rates") for text in options.rates))


def _check(options: BenchStep) -> None:
    """Refuse what cannot work before anything starts, each with what would."""
    check_hosts(options.hosts, "--hosts")
    try:
        workloads.check(options.model)
    except WorkloadError as error:
        raise CommandError(str(error), USAGE) from error
    check_place(options.loopback)


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
