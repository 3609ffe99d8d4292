"""What measurements on several sizes say, in sentences: measured first, then modelled."""

from __future__ import annotations

from ..contenders import DENSE
from ..step.findings import comparison
from .view import Scale


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
