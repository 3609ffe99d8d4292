"""What trainings to a target say, in sentences: a headline, and what else there is to say."""

from __future__ import annotations

from sparsewire.report import plural

from ..step.findings import slow_links
from ..timing import conclusion, ties
from ..words import say_seconds
from .columns import Race


def headline(race: Race) -> str:
    """Return the main finding, in one sentence."""
    where, goal, dense = f"On {race.run.hosts} hosts {race.run.place}", race.aim, race.run.dense
    schemes = [one for one in race.arrived if one.kind == "scheme"]
    if not race.arrived:
        return f"{where}, nobody reached {goal} in {plural(race.limit_steps, 'step')}."
    if not schemes:
        one = race.arrived[0]
        took = say_seconds(one.last.seconds)
        return f"{where}, {one.name} reaches {goal} in {took}; no scheme does."
    best, *others = schemes
    rivals = {one.name: one.timing for one in others}
    said = f"{where}, {best.name} reaches {goal} in {say_seconds(best.last.seconds)}"
    if dense is not None and race.got_there(dense):
        found = conclusion(best.timing, dense.timing, rivals)
        return f"{said}, dense DDP in {say_seconds(dense.last.seconds)}: {found}."
    alone = "" if dense is None else "; dense DDP does not"
    return f"{said}{alone}{ties(best.timing, rivals)}."


def remarks(race: Race) -> list[str]:
    """Return everything else worth knowing, whoever it speaks for."""
    said, dense = [], race.run.dense
    for one in race.run.contenders:
        if one.failed:
            said.append(f"{one.name} failed: {one.failed}")
        elif not race.got_there(one):
            said.append(
                f"{one.name} did not get there in {plural(race.limit_steps, 'step')} and "
                f"{say_seconds(one.last.seconds)}: its best was {race.goal.shown(race.best(one))}."
            )
        elif dense is not None and one is not dense and race.got_there(dense):
            more = one.last.step - dense.last.step
            if more > 0:
                said.append(f"{one.name} needs {plural(more, 'step')} more than dense DDP.")
            if dense.timing.beats(one.timing):
                said.append(f"{one.name} gets there later than dense DDP.")
    return said + slow_links(race.run)
