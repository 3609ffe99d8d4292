"""`sparsewire bench scale`: bytes and time of a step against the number of hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..bench.contenders import COMPUTE
from ..bench.plan import interleave
from ..bench.results import Results
from ..bench.scale import page, picture, table
from ..bench.scale.results import Scale, headline, remarks
from ..bench.setting import Setting
from ..lab import Loopback
from . import progress, site
from .bench import StepSession, check_model, plan_of
from .errors import USAGE, CommandError
from .measuring import arguments, name_contenders, prepare
from .options import BenchScale
from .publish import publish


def scale(options: BenchScale) -> int:
    """Measure on networks of every size, fit the model, print the tables and write the rest."""
    names = [COMPUTE, *name_contenders(("dense",), options.schemes)]
    rate = None if options.loopback else site.read_rate(options.rate)
    hosts = sorted(set(options.hosts))
    _check(options, hosts)
    plan = plan_of(options, names)
    alone_plan = replace(plan, turns=interleave([COMPUTE], options.rounds))
    setting = Setting.here(arguments("sparsewire bench scale", options))
    sizes = []
    with progress.choose(options.quiet) as shown:
        with Loopback(1) as single:  # one host that has the machine for itself
            session = StepSession(alone_plan, [COMPUTE], shown, options.debug)
            alone = session.run(single, None).floor.median
        for number in hosts:
            with site.choose(number, rate, options.loopback) as place:
                session = StepSession(plan, names, shown, options.debug)
                run = session.run(place, rate)
            model = {"name": options.model, **session.model}
            sizes.append(Results(setting, model, number, (run,)))
    found = Scale(setting, model, alone, options.most, session.buckets, tuple(sizes))
    if not found.names:
        raise CommandError(f"nothing could be measured: {run.failed[0].failed}")
    told = [*table.build(found), headline(found), *remarks(found)]
    told.append(f"report: {options.out / 'report.html'}")

    def write(out: Path) -> None:
        picture.save(found, out / "scale.png", out / "scale.svg")
        page.save(found, out / "report.html")

    publish(options.out, found.to_dict(), write, told, options.json)
    return 0


def _check(options: BenchScale, hosts: list[int]) -> None:
    """Refuse what cannot work before anything starts, each with what would."""
    for number in hosts:
        site.check_hosts(number, "--hosts")
    if len(hosts) < 2:
        raise CommandError(
            "--hosts needs two numbers or more, like 2 4 8: a model needs both", USAGE
        )
    if hosts[-1] > options.most:
        raise CommandError(f"--most must be at least {hosts[-1]}, not {options.most}", USAGE)
    check_model(options.model)
    prepare(options)
