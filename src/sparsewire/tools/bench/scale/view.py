"""Steps on networks of several sizes, and the model fitted to them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from ..contenders import COMPUTE, DENSE
from ..results import Contender, Results, Run, rounded
from .model import Loads, Measured, Model, fit, share


@dataclass(frozen=True)
class Checked:
    """The model beside one measured step."""

    name: str
    hosts: int
    measured: float
    modelled: float

    @property
    def error(self) -> float:
        """The relative error of the model."""
        return self.modelled / self.measured - 1


@dataclass(frozen=True)
class Scale:
    """Measurements of the same contenders on networks of different sizes, the smallest first."""

    results: Results

    @property
    def runs(self) -> tuple[Run, ...]:
        """One for each number of hosts."""
        return self.results.runs

    @property
    def alone(self) -> float:
        """Seconds of a step of one host that has the machine to itself."""
        return float(self.results.facts["alone"])

    @property
    def most(self) -> int:
        """The number of hosts up to which the model goes."""
        return int(self.results.facts["most"])

    @cached_property
    def names(self) -> list[str]:
        """The contenders that exchange and were measured."""
        found = dict.fromkeys(one.name for run in self.runs for one in run.finished)
        return [name for name in found if name != COMPUTE]

    @property
    def schemes(self) -> list[str]:
        """The names of sparsewire's schemes."""
        return [name for name in self.names if name != DENSE]

    def measured(self, name: str) -> dict[int, Contender]:
        """Return a contender's steps by the number of hosts."""
        found = {run.hosts: run.named(name) for run in self.runs}
        return {hosts: one for hosts, one in found.items() if one is not None}

    @cached_property
    def loads(self) -> dict[str, Loads]:
        """The loads of every contender."""
        buckets = self.results.facts["buckets"]
        return {name: Loads(name, buckets[name]) for name in self.names}

    @cached_property
    def _points(self) -> dict[tuple[str, int], Measured]:
        """Every measurement, by contender and number of hosts."""
        cores = self.results.setting.machine["cores"]
        return {
            (one.name, run.hosts): Measured(
                self.loads[one.name].on(run.hosts),
                share(run.hosts, cores),
                run.floor.median,
                one.median,
            )
            for run in self.runs
            for one in run.finished
            if one.name != COMPUTE
        }

    @cached_property
    def fitted(self) -> Model:
        """The model, fitted to all measured steps of all contenders together."""
        return fit([*self._points.values()])

    @cached_property
    def checked(self) -> list[Checked]:
        """The model beside every measurement, with cores shared as in the measurement."""
        return [
            Checked(*key, point.step, point.compute + self.fitted.beyond(point.load, point.share))
            for key, point in self._points.items()
        ]

    @property
    def mean_error(self) -> float:
        """The mean error of the model, whichever way it is off."""
        return sum(abs(one.error) for one in self.checked) / len(self.checked)

    @property
    def worst(self) -> Checked:
        """The measurement with the largest error of the model."""
        return max(self.checked, key=lambda one: abs(one.error))

    def modelled(self, name: str, hosts: int) -> float:
        """Return the modelled seconds of a step on hosts that do not share cores."""
        return self.alone + self.fitted.beyond(self.loads[name].on(hosts))

    def received(self, name: str, hosts: int) -> int:
        """Return the bytes that a host receives in a step; exact, not modelled."""
        return self.loads[name].on(hosts).received

    @cached_property
    def doublings(self) -> list[int]:
        """Numbers of hosts to show the model for."""
        found = [2**power for power in range(1, self.most.bit_length())]
        return found if found[-1] == self.most else [*found, self.most]

    def crossover(self, name: str) -> int | None:
        """Return the number of hosts from which dense DDP is as fast in the model, if any."""
        return self._from_on(lambda n: self.modelled(name, n) >= self.modelled(DENSE, n))

    def lead(self, name: str) -> int | None:
        """Return the number of hosts from which dense DDP is slower in the model, if any."""
        return self._from_on(lambda n: self.modelled(name, n) < self.modelled(DENSE, n))

    def crossover_of_bytes(self, name: str) -> int | None:
        """Return the number of hosts from which dense DDP receives no more, if any."""
        return self._from_on(lambda n: self.received(name, n) >= self.received(DENSE, n))

    def _from_on(self, holds: Callable[[int], bool]) -> int | None:
        """Return the least number of hosts from which this holds up to `most`, if it does."""
        held = list(takewhile(holds, reversed(self.doublings)))
        if not held:
            return None
        between = range(max(2, held[-1] // 2), held[-1] + 1)
        return between[bisect_left(between, True, key=holds)]


def follows(results: Results) -> dict[str, Any]:
    """Return what results.json derives from the measurement: fit, model and crossovers."""
    scale = Scale(results)
    return {
        "fitted": {
            "seconds_per": asdict(scale.fitted),
            "mean_error": round(scale.mean_error, 6),
            "largest_error": round(scale.worst.error, 6),
            "points": [rounded({**asdict(one), "error": one.error}) for one in scale.checked],
        },
        "modelled": [
            rounded(
                {
                    "name": name,
                    "hosts": hosts,
                    "seconds": scale.modelled(name, hosts),
                    "received": scale.received(name, hosts),
                }
            )
            for name in scale.names
            for hosts in scale.doublings
        ],
        "crossovers": {
            name: {"seconds": scale.crossover(name), "received": scale.crossover_of_bytes(name)}
            for name in scale.schemes
            if DENSE in scale.names
        },
    }
