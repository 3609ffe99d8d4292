"""`sparsewire bench scale`: bytes and time of a step against the number of hosts.

The columns of its tables are in `bench/scale/columns.py`.
"""

from __future__ import annotations

from dataclasses import replace

from ..bench.contenders import COMPUTE
from ..bench.results import Results
from ..bench.scale.view import Scale
from ..bench.setting import Setting, arguments
from ..bench.step.rank import interleave
from ..lab import Loopback
from ..tasks import workloads
from . import site
from .bench_session import name_contenders, prepare, tell
from .bench_step import StepSession, plan_of
from .errors import USAGE, CommandError
from .options import BenchScale
from .progress import Progress


def scale(options: BenchScale) -> int:
    """Measure on networks of every size, fit the model, print the tables and write the rest."""
    names = [COMPUTE, *name_contenders(("dense",), options.schemes)]
    rate = None if options.loopback else site.read_rate(options.rate)
    hosts = sorted(set(options.hosts))
    _check(options, hosts)
    plan = plan_of(options, names)
    alone_plan = replace(plan, turns=interleave([COMPUTE], options.rounds))
    setting = Setting.here(arguments("sparsewire bench scale", options))
    runs = []
    with Progress(options.quiet) as shown:
        with Loopback(1) as single:  # one host that has the machine for itself
            session = StepSession(alone_plan, [COMPUTE], shown, options.debug)
            alone = session.run(single, None).floor.median
        for number in hosts:
            with site.choose(number, rate, options.loopback) as place:
                session = StepSession(plan, names, shown, options.debug)
                runs.append(session.run(place, rate))
    model = {"name": options.model, **session.model}
    facts = {"alone": alone, "most": options.most, "buckets": session.buckets}
    results = Results("scale", setting, model, tuple(runs), facts)
    if not Scale(results).names:
        raise CommandError(f"nothing could be measured: {runs[-1].failed[0].failed}")
    tell(results, options)
    return 0


def _check(options: BenchScale, hosts: list[int]) -> None:
    """Raise an error for options that cannot work, before anything starts."""
    for number in hosts:
        site.check_hosts(number, "--hosts")
    if len(hosts) < 2:
        raise CommandError(
            "--hosts needs two numbers or more, like 2 4 8: a model needs both", USAGE
        )
    if hosts[-1] > options.most:
        raise CommandError(f"--most must be at least {hosts[-1]}, not {options.most}", USAGE)
    workloads.check(options.model)
    prepare(options)
