"""How the contenders of a race fared, what follows from it, and both as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from sparsewire.report import plural

from ...lab import Link
from ..contenders import DENSE, kind
from ..results import ResultsError, place_in_words, rounded, say_seconds
from ..setting import Setting
from ..timing import Timing, conclusion, ties
from .tasks import GOALS, Goal

SCHEMA = 2


@dataclass(frozen=True)
class Point:
    """Where a training stood at a look at the test set; bytes are what one host had sent."""

    step: int
    seconds: float
    score: float
    payload: float = 0.0
    wire: float | None = 0.0

    @property
    def sent(self) -> float:
        """Bytes sent: counted if they could be, else those of the messages."""
        return self.payload if self.wire is None else self.wire


@dataclass(frozen=True)
class Runner:
    """One contender's training; `failed` says why it could not go on."""

    name: str
    points: tuple[Point, ...]
    failed: str | None = None

    @property
    def kind(self) -> str:
        """Whether it is a "peer" or a "scheme"."""
        return kind(self.name)

    @property
    def last(self) -> Point:
        """Where it stood in the end."""
        return self.points[-1]

    @property
    def timing(self) -> Timing:
        """When it got to where it stands, which was between the last two looks.

        The spread covers all steps between them, at the quartiles of the time per step.
        """
        before, last = self.points[-2:]
        step = Timing.of(
            [(b.seconds - a.seconds) / (b.step - a.step) for a, b in pairwise(self.points)]
        )
        low = min(before.seconds, step.low * before.step)
        high = max(last.seconds, step.high * last.step)
        return Timing(last.seconds, low, high)


@dataclass(frozen=True)
class Race:
    """A race on one network."""

    setting: Setting
    model: dict[str, Any]
    hosts: int
    network: str  # "lab" or "loopback"
    rate: int | None
    links: tuple[Link, ...]
    target: float
    limit_steps: int
    runners: tuple[Runner, ...]
    kind: str = field(default="train", init=False)

    @property
    def place(self) -> str:
        """The network in words."""
        return place_in_words(self.network, self.rate)

    @property
    def goal(self) -> Goal:
        """What the scores mean."""
        return GOALS[self.model["name"]]

    @property
    def aim(self) -> str:
        """The target in words."""
        return self.goal.aim(self.target)

    @property
    def dense(self) -> Runner | None:
        """Dense DDP, if it took part."""
        return next((one for one in self.runners if one.name == DENSE), None)

    @property
    def arrived(self) -> list[Runner]:
        """Those that got there, the fastest first."""
        there = [one for one in self.runners if self.got_there(one)]
        return sorted(there, key=lambda one: one.last.seconds)

    def got_there(self, one: Runner) -> bool:
        """Whether it reached the target."""
        return not one.failed and self.goal.reached(one.last.score, self.target)

    def speed_up(self, one: Runner) -> float | None:
        """Dense DDP's time to the target over its own; None unless both got there."""
        dense = self.dense
        if dense is None or not self.got_there(dense) or not self.got_there(one):
            return None
        return dense.last.seconds / one.last.seconds

    def best(self, one: Runner) -> str:
        """The best score that it had, as people read it."""
        return self.goal.shown(self.goal.best([point.score for point in one.points]))

    def examples_per_second(self, one: Runner) -> float | None:
        """Over all hosts, while the clock ran."""
        if not one.last.step:
            return None
        return float(one.last.step * self.model["examples"] * self.hosts / one.last.seconds)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it, with what follows from the points beside them."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            **asdict(self.setting),
            "model": self.model,
            "hosts": self.hosts,
            "network": self.network,
            "rate": self.rate,
            "links": [asdict(link) for link in self.links],
            "target": self.target,
            "limit_steps": self.limit_steps,
            "contenders": [self._shown(one) for one in self.runners],
        }

    def _shown(self, one: Runner) -> dict[str, Any]:
        there = self.got_there(one)
        shown = {
            "name": one.name,
            "kind": one.kind,
            "failed": one.failed,
            "reached": there,
            "summary": {
                "seconds_to_target": one.last.seconds if there else None,
                "steps_to_target": one.last.step if there else None,
                "bytes_to_target": one.last.sent if there else None,
                "examples_per_second": self.examples_per_second(one),
                "speed_up": self.speed_up(one),
                "best_score": self.goal.best([point.score for point in one.points]),
            },
            "points": [asdict(point) for point in one.points],
        }
        return rounded(shown)  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Race:
        """The race that `to_dict` and JSON made `fields` from.

        Raises:
            ResultsError: it is none, or of another version.
        """
        try:
            if (fields["schema"], fields["kind"]) != (SCHEMA, "train"):
                raise ResultsError(
                    f"these are results of kind {fields['kind']!r}, schema {fields['schema']}: "
                    f"this reads kind 'train', schema {SCHEMA}"
                )
            return cls(
                setting=Setting(**{key: fields[key] for key in Setting.__dataclass_fields__}),
                links=tuple(Link(**link) for link in fields["links"]),
                runners=tuple(
                    Runner(one["name"], tuple(Point(**p) for p in one["points"]), one["failed"])
                    for one in fields["contenders"]
                ),
                **{
                    key: fields[key]
                    for key in ("model", "hosts", "network", "rate", "target", "limit_steps")
                },
            )
        except (KeyError, TypeError) as error:
            raise ResultsError(f"these are no results: {error!r}") from error


def headline(race: Race) -> str:
    """What a reader wants to know first, in a sentence."""
    where = f"On {race.hosts} hosts {race.place}"
    goal = race.aim
    schemes = [one for one in race.arrived if one.kind == "scheme"]
    dense = race.dense
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
    """What else is to be said, whoever it speaks for."""
    said = []
    dense = race.dense
    for one in race.runners:
        if one.failed:
            said.append(f"{one.name} failed: {one.failed}")
        elif not race.got_there(one):
            said.append(
                f"{one.name} did not get there in {plural(race.limit_steps, 'step')} and "
                f"{say_seconds(one.last.seconds)}: its best was {race.best(one)}."
            )
        elif dense is not None and one is not dense and race.got_there(dense):
            more = one.last.step - dense.last.step
            if more > 0:
                said.append(f"{one.name} needs {plural(more, 'step')} more than dense DDP.")
            if dense.timing.beats(one.timing):
                said.append(f"{one.name} gets there later than dense DDP.")
    said += [
        f"The link of {link.name} is more than 10 % off its rate."
        for link in race.links
        if not link.fits
    ]
    return said
