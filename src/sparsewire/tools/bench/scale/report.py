"""The report and the picture of `bench scale`: bytes and time against the number of hosts.

Both scales are logarithmic. What was measured is solid, what is worked out or modelled is dashed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sparsewire.report import human_bytes

from .. import report
from ..contenders import COMPUTE, DENSE
from ..drawing import write
from ..report import Facts, Notes, Page, Section
from ..report.chart import Chart, Panel, Series, draw
from ..results import Results
from ..step.report import comparison
from ..table import Table
from ..timing import RULE
from ..words import say_seconds
from .columns import tables
from .view import Scale

_METHOD = (
    "On every number of hosts, all contenders take turns in one run, compute alone among them, as "
    "in sparsewire bench step. A step's time is the median over all steps of all rounds, "
    "and the quartiles are its spread.",
    RULE,
    "Bytes received are those of the messages. For schemes they follow exactly from their sizes, "
    "and the measured points are what each rank counted; for dense DDP they are those of a ring "
    "all-reduce.",
)
_MODEL = (
    "Modelled, not measured: step(W) − compute(W) = a + l·hops + b·bytes + "
    "s·(c·bytes + d·looked_at + g·added), for W hosts. Hops are W − 1 for each "
    "all-gather of a step and twice that for each all-reduce; bytes are those a host "
    "receives; looked_at are the values that a scheme selects from; added are the selected values "
    "that a host adds up one by one: those of all hosts, or, where they are added on the way, as "
    "many as one host selects.",
    "s = max(1, W / cores) is how many hosts a core of this machine serves. It stretches the "
    "work of a host's own core, which moves bytes, selects and adds up, and nothing else.",
    "The six coefficients are the same for all contenders. None is negative, and they minimize the "
    "squared errors over all measured points, each error relative to the measured step.",
    "Beyond the measured numbers of hosts, the model uses s = 1, as if each had cores of its own, "
    "and compute as for one host that has this machine to itself. It does not include switches "
    "that are shared, stragglers, or collectives other than rings.",
    "The part of an exchange that hides behind backward is in the coefficients only as far as it "
    "did so in the measured steps.",
)
_STYLES = (
    ("solid", "measured, on hosts that share cores"),
    ("dashed", "formula (bytes) or model (time), on hosts with cores of their own"),
    ("tick", "model, cores shared as measured"),
)
Say = Callable[[float], str]


def page(results: Results) -> Page:
    """Return the report."""
    scale = Scale(results)
    measured, modelled, received = tables(scale)
    links = [
        block for run in scale.runs for block in report.links(run.links, f" of {run.hosts} hosts")
    ]
    return Page(
        f"Steps of {results.model['name']} against the number of hosts",
        results.setting,
        headline(scale),
        report.model_in_words(results.model),
        (
            Section(
                "Bytes and time against the number of hosts",
                (chart(scale), Notes(tuple(remarks(scale)))),
            ),
            Section("Measured, and the model beside it", (measured, *links)),
            Section("The model", (modelled, received, Notes(_MODEL), _coefficients(scale))),
        ),
        (*_METHOD, *report.shared_cores(results.setting, max(run.hosts for run in scale.runs))),
    )


def shown(results: Results) -> list[Table | str]:
    """Return what the terminal shows."""
    scale = Scale(results)
    return [*tables(scale), headline(scale), *remarks(scale)]


def save_picture(results: Results, *paths: Path) -> None:
    """Draw the lines, in the formats that the names of `paths` end in."""
    write(draw(chart(Scale(results))), *paths)


def chart(scale: Scale) -> Chart:
    """Return two panels: bytes received, and time."""
    received: list[Series] = []
    seconds: list[Series] = []
    for number, name in enumerate(scale.names):
        ones, checks = scale.measured(name), [one for one in scale.checked if one.name == name]
        bytes_ = [float(scale.received(name, hosts)) for hosts in scale.doublings]
        times = [scale.modelled(name, hosts) for hosts in scale.doublings]
        hosts = [one.hosts for one in checks]
        received += [
            _series(name, number, scale.doublings, bytes_, human_bytes, "dashed"),
            _series(name, number, [*ones], [o.payload for o in ones.values()], human_bytes),
        ]
        seconds += [
            _series(name, number, scale.doublings, times, say_seconds, "dashed"),
            _series(name, number, hosts, [one.modelled for one in checks], say_seconds, "tick"),
            _series(name, number, hosts, [one.measured for one in checks], say_seconds),
        ]
    floor = {run.hosts: run.floor.median for run in scale.runs}
    alone, number = [scale.alone] * len(scale.doublings), len(scale.names)
    seconds += [
        _series(COMPUTE, number, scale.doublings, alone, say_seconds, "dashed"),
        _series(COMPUTE, number, [*floor], [*floor.values()], say_seconds),
    ]
    ticks = tuple(n for n in scale.doublings if n.bit_length() % 2 == 0 or n == 2)
    place = scale.runs[0].place
    return Chart(
        headline(scale),
        (
            _panel("Received per host and step", received, ticks, human_bytes),
            _panel(f"Time of a step {place}", seconds, ticks, say_seconds),
        ),
        _STYLES,
    )


def _panel(title: str, series: list[Series], ticks: tuple[int, ...], say: Say) -> Panel:
    return Panel(title, "hosts", tuple(series), ticks=ticks, say=say)


def _series(
    name: str,
    number: int,
    hosts: Sequence[int],
    heights: Sequence[float],
    say: Say,
    style: str = "solid",
) -> Series:
    what = dict(_STYLES)[style].partition(",")[0]
    told = [
        f"{name}\n{n} hosts: {say(height)} ({what})"
        for n, height in zip(hosts, heights, strict=True)
    ]
    return Series(name, number, hosts, heights, told, style)


def _coefficients(scale: Scale) -> Facts:
    fitted = scale.fitted
    return Facts(
        (
            ("a", f"{say_seconds(fitted.step)} per step"),
            ("l", f"{1e6 * fitted.hop:.3g} µs per hop"),
            ("b", f"{1e9 * fitted.byte:.3g} ns per byte received, on the link"),
            ("c", f"{1e9 * fitted.move:.3g} ns per byte received, of a core"),
            ("d", f"{1e9 * fitted.look:.3g} ns per value looked at"),
            ("g", f"{1e9 * fitted.addition:.3g} ns per value added"),
            ("compute", f"{say_seconds(scale.alone)} on one host alone"),
        )
    )


def headline(scale: Scale) -> str:
    """Return the main finding, in one sentence."""
    run = max(scale.runs, key=lambda run: run.hosts)
    where = f"On {run.hosts} hosts {run.place}"
    if not run.schemes or run.dense is None:
        return f"{where}, there was nothing to compare."
    name = run.schemes[0].name
    return f"{where}, {comparison(run)}; in the model {name} {_prospect(scale, name)}."


def _prospect(scale: Scale, name: str) -> str:
    """Say how a scheme fares in the model as the number of hosts grows."""
    begin, lead = scale.crossover(name), scale.lead(name)
    fares = "faster" if begin is None else "no faster"
    since = lead if begin is None else begin
    where = f"up to {scale.most} hosts" if since == 2 else f"from {since} hosts on"
    return f"is {fares} than dense DDP {where}"


def remarks(scale: Scale) -> list[str]:
    """Return everything else worth knowing, whoever it speaks for."""
    worst = scale.worst
    said = [
        f"The model is off by {scale.mean_error:.0%} on average, and by {worst.error:+.0%} at "
        f"worst: {worst.name} on {worst.hosts} hosts."
    ]
    if len(scale.checked) < 12:
        said.append(
            f"It has 6 coefficients from only {len(scale.checked)} measured points: take it as a "
            f"guess."
        )
    for name in scale.schemes if DENSE in scale.names else ():
        crossing = scale.crossover_of_bytes(name)
        about = (
            f"fewer bytes than dense DDP up to {scale.most} hosts"
            if crossing is None
            else f"as many bytes as dense DDP from {crossing} hosts on"
        )
        said.append(
            f"With {name} a host receives {about}; in the model it {_prospect(scale, name)}."
        )
    for run in scale.runs:
        said += [f"{one.name} failed on {run.hosts} hosts: {one.failed}" for one in run.failed]
        said += [
            f"With {run.hosts} hosts, the link of {link.name} is more than 10 % off its rate."
            for link in run.links
            if not link.fits
        ]
    return said
