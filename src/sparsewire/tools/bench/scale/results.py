"""Steps on networks of several sizes, the model fitted to them, and all of it as JSON."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

from ..contenders import COMPUTE, DENSE
from ..results import SCHEMA, Contender, Results, ResultsError, Run, comparison, rounded
from ..setting import Setting
from .loads import Loads
from .model import Measured, Model, fit, share


@dataclass(frozen=True)
class Checked:
    """The model beside one measured step."""

    name: str
    hosts: int
    measured: float
    modelled: float

    @property
    def error(self) -> float:
        """How far the model is off, as a share of what was measured."""
        return self.modelled / self.measured - 1


@dataclass(frozen=True)
class Scale:
    """Measurements of the same contenders on networks of different sizes.

    Args:
        alone: seconds of a step of one host that has the machine for itself.
        most: hosts up to which the model goes.
        buckets: by contender, what DDP had exchanged together.
        sizes: the measurements, the smallest network first; each with a single run.
    """

    setting: Setting
    model: dict[str, Any]
    alone: float
    most: int
    buckets: dict[str, list[dict[str, list[int]]]]
    sizes: tuple[Results, ...]
    kind: str = field(default="scale", init=False)

    @property
    def place(self) -> str:
        """The network in words."""
        return self.sizes[0].runs[0].place

    @property
    def cores(self) -> int:
        """Of the machine that all hosts share."""
        return int(self.setting.machine["cores"])

    @cached_property
    def names(self) -> list[str]:
        """Everybody who exchanges and could be measured."""
        found = [one.name for _, run in self.runs for one in run.finished]
        return [name for name in dict.fromkeys(found) if name != COMPUTE]

    @property
    def schemes(self) -> list[str]:
        """Those of sparsewire."""
        return [name for name in self.names if name != DENSE]

    @property
    def runs(self) -> Iterator[tuple[int, Run]]:
        """Each measurement with its number of hosts."""
        for size in self.sizes:
            yield size.hosts, size.runs[0]

    def measured(self, name: str) -> dict[int, Contender]:
        """A contender's steps by the number of hosts."""
        return {hosts: one for hosts, run in self.runs for one in run.finished if one.name == name}

    @cached_property
    def loads(self) -> dict[str, Loads]:
        """What each of them loads a host with."""
        return {name: Loads(name, self.buckets[name]) for name in self.names}

    @cached_property
    def fitted(self) -> Model:
        """The model, fitted to all measured steps of all contenders together."""
        return fit(
            [
                Measured(
                    self.loads[one.name].on(hosts),
                    share(hosts, self.cores),
                    run.floor.median,
                    one.median,
                )
                for hosts, run in self.runs
                for one in run.finished
                if one.name != COMPUTE
            ]
        )

    @cached_property
    def checked(self) -> list[Checked]:
        """The model beside everything that was measured, with cores shared as they were."""
        found = []
        for hosts, run in self.runs:
            for one in run.finished:
                if one.name != COMPUTE:
                    load, shared = self.loads[one.name].on(hosts), share(hosts, self.cores)
                    modelled = run.floor.median + self.fitted.beyond(load, shared)
                    found.append(Checked(one.name, hosts, one.median, modelled))
        return found

    @property
    def mean_error(self) -> float:
        """Of the model, whichever way it is off."""
        return sum(abs(one.error) for one in self.checked) / len(self.checked)

    @property
    def worst(self) -> Checked:
        """Where the model is off the most."""
        return max(self.checked, key=lambda one: abs(one.error))

    def modelled(self, name: str, hosts: int) -> float:
        """Seconds of a step on so many hosts with cores of their own."""
        return self.alone + self.fitted.beyond(self.loads[name].on(hosts))

    def received(self, name: str, hosts: int) -> int:
        """Bytes that a host receives in a step; exact, not modelled."""
        return self.loads[name].on(hosts).received

    @cached_property
    def doublings(self) -> list[int]:
        """Numbers of hosts to show the model for."""
        found = [2**power for power in range(1, self.most.bit_length())]
        return found if found[-1] == self.most else [*found, self.most]

    def crossover(self, name: str) -> int | None:
        """The number of hosts from which dense DDP is as fast in the model, if there is one."""
        return self._from_on(lambda n: self.modelled(name, n) >= self.modelled(DENSE, n))

    def lead(self, name: str) -> int | None:
        """The number of hosts from which dense DDP is slower in the model, if there is one."""
        return self._from_on(lambda n: self.modelled(name, n) < self.modelled(DENSE, n))

    def crossover_of_bytes(self, name: str) -> int | None:
        """The number of hosts from which dense DDP receives no more, if there is one."""
        return self._from_on(lambda n: self.received(name, n) >= self.received(DENSE, n))

    def _from_on(self, holds: Callable[[int], bool]) -> int | None:
        """The least number of hosts from which this holds up to `most`; None if it does not."""
        held = list(takewhile(holds, reversed(self.doublings)))
        if not held:
            return None
        between = range(max(2, held[-1] // 2), held[-1] + 1)
        return between[bisect_left(between, True, key=holds)]

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it, with what follows from the samples beside them."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            **asdict(self.setting),
            "model": self.model,
            "alone": round(self.alone, 6),
            "most": self.most,
            "buckets": self.buckets,
            "sizes": [
                {key: size.to_dict()[key] for key in ("hosts", "runs")} for size in self.sizes
            ],
            "fitted": {
                "seconds_per": self.fitted.to_dict(),
                "mean_error": round(self.mean_error, 6),
                "largest_error": round(self.worst.error, 6),
                "points": [rounded({**asdict(one), "error": one.error}) for one in self.checked],
            },
            "modelled": [
                rounded(
                    {
                        "name": name,
                        "hosts": hosts,
                        "seconds": self.modelled(name, hosts),
                        "received": self.received(name, hosts),
                    }
                )
                for name in self.names
                for hosts in self.doublings
            ],
            "crossovers": {
                name: {"seconds": self.crossover(name), "received": self.crossover_of_bytes(name)}
                for name in self.schemes
                if DENSE in self.names
            },
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Scale:
        """The measurement that `to_dict` and JSON made `fields` from.

        Raises:
            ResultsError: it is none, or of another version.
        """
        try:
            if (fields["schema"], fields["kind"]) != (SCHEMA, "scale"):
                raise ResultsError(
                    f"these are results of kind {fields['kind']!r}, schema {fields['schema']}: "
                    f"this reads kind 'scale', schema {SCHEMA}"
                )
            return cls(
                Setting(**{key: fields[key] for key in Setting.__dataclass_fields__}),
                fields["model"],
                fields["alone"],
                fields["most"],
                fields["buckets"],
                tuple(
                    Results.from_dict({**fields, "kind": "step", **size})
                    for size in fields["sizes"]
                ),
            )
        except (KeyError, TypeError) as error:
            raise ResultsError(f"these are no results: {error!r}") from error


def headline(scale: Scale) -> str:
    """What a reader wants to know first, in a sentence: measured, then modelled."""
    hosts, run = max(scale.runs, key=lambda one: one[0])
    where = f"On {hosts} hosts {scale.place}"
    if not run.schemes or run.dense is None:
        return f"{where}, there was nothing to compare."
    name = run.schemes[0].name
    return f"{where}, {comparison(run)}; in the model {name} {_prospect(scale, name)}."


def _prospect(scale: Scale, name: str) -> str:
    """How a scheme fares in the model as the number of hosts grows."""
    begin, lead = scale.crossover(name), scale.lead(name)
    fares = "faster" if begin is None else "no faster"
    since = lead if begin is None else begin
    where = f"up to {scale.most} hosts" if since == 2 else f"from {since} hosts on"
    return f"is {fares} than dense DDP {where}"


def remarks(scale: Scale) -> list[str]:
    """What else is to be said, whoever it speaks for."""
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
    if DENSE in scale.names:
        for name in scale.schemes:
            crossing = scale.crossover_of_bytes(name)
            about = (
                f"fewer bytes than dense DDP up to {scale.most} hosts"
                if crossing is None
                else f"as many bytes as dense DDP from {crossing} hosts on"
            )
            said.append(
                f"With {name} a host receives {about}; in the model it {_prospect(scale, name)}."
            )
    for hosts, run in scale.runs:
        said += [f"{one.name} failed on {hosts} hosts: {one.failed}" for one in run.failed]
        said += [
            f"With {hosts} hosts, the link of {link.name} is more than 10 % off its rate."
            for link in run.links
            if not link.fits
        ]
    return said
