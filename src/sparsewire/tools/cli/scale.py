"""`sparsewire bench scale`: bytes and time of a step against the number of hosts."""

from __future__ import annotations

from rich.console import Console

from ..bench.contenders import COMPUTE
from ..bench.plan import Plan, interleave
from ..bench.progress import Progress, choose
from ..bench.results import Results, dumps
from ..bench.scale import page, picture, table
from ..bench.scale.results import Scale, headline, remarks
from ..bench.setting import Setting
from ..lab import Loopback
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
from .options import BenchScale
from .plan import check_hosts


def scale(options: BenchScale) -> int:
    """Measure on networks of every size, fit the model, print the tables and write the rest."""
    names = [COMPUTE, *name_contenders(("dense",), options.schemes)]
    rate = None if options.loopback else read_rate(options.rate, "--rate")
    hosts = sorted(set(options.hosts))
    _check(options, hosts)
    make_folder(options.out)
    plan = Plan(
        model=options.model,
        batch_size=options.batch_size,
        turns=interleave(names, options.rounds),
        steps=options.steps,
        timeout=options.timeout,
        counts={},
    )
    setting = Setting.here(arguments("sparsewire bench scale", options))
    sizes = []
    turns = len(plan.turns) * len(hosts) + options.rounds
    with choose(options.quiet, turns) as progress:
        alone = _alone(options, progress)
        for number in hosts:
            with place(number, rate, options.loopback) as site:
                session = Session(plan, names, progress, options.debug)
                run = session.run(site, rate)
            model = {"name": options.model, **session.model}
            sizes.append(Results(setting, model, number, (run,)))
    found = Scale(setting, model, alone, options.most, session.buckets, tuple(sizes))
    if not found.names:
        raise CommandError(f"nothing could be measured: {run.failed[0].failed}")
    _write(options, found)
    return 0


def _alone(options: BenchScale, progress: Progress) -> float:
    """Seconds of a step of one host that has the machine for itself and exchanges nothing."""
    plan = Plan(
        model=options.model,
        batch_size=options.batch_size,
        turns=interleave([COMPUTE], options.rounds),
        steps=options.steps,
        timeout=options.timeout,
        counts={},
    )
    with Loopback(1) as site:
        return Session(plan, [COMPUTE], progress, options.debug).run(site, None).floor.median


def _check(options: BenchScale, hosts: list[int]) -> None:
    """Refuse what cannot work before anything starts, each with what would."""
    for number in hosts:
        check_hosts(number, "--hosts")
    if len(hosts) < 2:
        raise CommandError(
            "--hosts needs two numbers or more, like 2 4 8: a model needs both", USAGE
        )
    if hosts[-1] > options.most:
        raise CommandError(f"--most must be at least {hosts[-1]}, not {options.most}", USAGE)
    try:
        workloads.check(options.model)
    except WorkloadError as error:
        raise CommandError(str(error), USAGE) from error
    check_place(options.loopback)


def _write(options: BenchScale, found: Scale) -> None:
    """Write all files, and print the tables or the JSON."""
    out, content = options.out, dumps(found.to_dict())
    try:
        (out / "results.json").write_text(content, encoding="utf-8")
        picture.save(found, out / "scale.png", out / "scale.svg")
        page.save(found, out / "report.html")
    except OSError as error:
        raise explain_os_error(error, "write results to") from None
    if options.json:
        print(content, end="")
        return
    console = Console()
    console.print(*table.build(found), sep="\n")
    for sentence in (headline(found), *remarks(found)):
        console.print(sentence, markup=False, highlight=False)
    console.print(f"report: {out / 'report.html'}", markup=False, highlight=False, soft_wrap=True)
