"""What was measured, what follows from it, and both as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from sparsewire.errors import SparsewireError

from ..lab import Link
from .contenders import COMPUTE, DENSE, kind
from .setting import Setting
from .stopwatch import PARTS
from .timing import Timing, conclusion, ties

SCHEMA = 1


class ResultsError(SparsewireError, ValueError):
    """A file that holds no results, or those of another version."""


@dataclass(frozen=True)
class Sample:
    """One step as the mean over all ranks, and how long each of them took."""

    round: int
    seconds: float
    ranks: tuple[float, ...]
    parts: dict[str, float]
    busy: dict[str, float]
    hidden: dict[str, float]
    payload: float
    wire: float | None


@dataclass(frozen=True)
class Contender:
    """All steps of one contender on one network; `failed` says why there are no more."""

    name: str
    samples: tuple[Sample, ...] = ()
    failed: str | None = None

    @property
    def kind(self) -> str:
        """Whether it is the "floor", a "peer" or a "scheme"."""
        return kind(self.name)

    @cached_property
    def timing(self) -> Timing:
        """The time of a step, and its spread over all steps."""
        return Timing.of([sample.seconds for sample in self.samples])

    @property
    def median(self) -> float:
        """Seconds of the step in the middle."""
        return self.timing.seconds

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the steps took a time between these two."""
        return self.timing.low, self.timing.high

    @cached_property
    def parts(self) -> dict[str, float]:
        """The median step split as the mean step is, so that the parts add up to it."""
        scale = self.median / statistics.fmean(sample.seconds for sample in self.samples)
        return {
            part: scale * statistics.fmean(sample.parts[part] for sample in self.samples)
            for part in PARTS
        }

    @property
    def hidden(self) -> float | None:
        """The share of the exchange that went on behind backward."""
        busy = sum(sample.busy["exchange"] for sample in self.samples)
        behind = sum(sample.hidden["exchange"] for sample in self.samples)
        return behind / busy if busy else None

    @property
    def payload(self) -> float:
        """Bytes of messages that one rank sends in a step."""
        return statistics.fmean(sample.payload for sample in self.samples)

    @property
    def wire(self) -> float | None:
        """Bytes that leave a host in a step, as its interface counts them."""
        counted = [sample.wire for sample in self.samples if sample.wire is not None]
        return statistics.median(counted) if counted else None

    @property
    def sent(self) -> float:
        """Bytes sent in a step: counted if they could be, else those of the messages."""
        return self.payload if self.wire is None else self.wire


@dataclass(frozen=True)
class Run:
    """All contenders on one network; `rate` is None for links as fast as the machine."""

    network: str  # "lab" or "loopback"
    rate: int | None
    links: tuple[Link, ...]
    contenders: tuple[Contender, ...]

    @property
    def finished(self) -> list[Contender]:
        """Those with steps to show, in the order they were asked for."""
        return [one for one in self.contenders if one.samples and not one.failed]

    @property
    def failed(self) -> list[Contender]:
        """Those without."""
        return [one for one in self.contenders if one not in self.finished]

    @property
    def floor(self) -> Contender:
        """Compute alone."""
        return self._named(COMPUTE) or self.contenders[0]

    @property
    def dense(self) -> Contender | None:
        """Dense DDP, if it took part."""
        return self._named(DENSE)

    @property
    def schemes(self) -> list[Contender]:
        """Those of sparsewire, the fastest first."""
        schemes = [one for one in self.finished if one.kind == "scheme"]
        return sorted(schemes, key=lambda one: one.median)

    @property
    def peers(self) -> list[Contender]:
        """What torch offers besides dense DDP."""
        return [one for one in self.finished if one.kind == "peer" and one.name != DENSE]

    def against_dense(self, one: Contender) -> str:
        """A contender beside dense DDP, in a word or two; floors compete with nobody."""
        if self.dense is None or one is self.dense or one.kind == "floor":
            return ""
        return one.timing.verdict(self.dense.timing)

    def _named(self, name: str) -> Contender | None:
        return next((one for one in self.finished if one.name == name), None)

    @property
    def place(self) -> str:
        """The network in words."""
        return place_in_words(self.network, self.rate)


@dataclass(frozen=True)
class Results:
    """A measurement of training steps on one or more networks."""

    setting: Setting
    model: dict[str, Any]
    hosts: int
    runs: tuple[Run, ...]
    kind: str = field(default="step", init=False)

    def examples_per_second(self, contender: Contender) -> float | None:
        """Over all hosts, if the size of a batch is known."""
        examples = self.model["examples"]
        return examples * self.hosts / contender.median if examples else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it, with what follows from the samples beside them."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            **asdict(self.setting),
            "model": self.model,
            "hosts": self.hosts,
            "runs": [
                {
                    "network": run.network,
                    "rate": run.rate,
                    "links": [asdict(link) for link in run.links],
                    "contenders": [self._shown(run, one) for one in run.contenders],
                }
                for run in self.runs
            ],
        }

    def _shown(self, run: Run, one: Contender) -> dict[str, Any]:
        shown: dict[str, Any] = {"name": one.name, "kind": one.kind, "failed": one.failed}
        if one in run.finished:
            shown["summary"] = {
                "median": one.median,
                "quartiles": list(one.quartiles),
                "parts": one.parts,
                "exchange_hidden": one.hidden,
                "payload_per_step": one.payload,
                "wire_per_step": one.wire,
                "examples_per_second": self.examples_per_second(one),
                "times_dense": one.median / run.dense.median if run.dense else None,
                "times_compute": one.median / run.floor.median,
            }
        shown["samples"] = [asdict(sample) for sample in one.samples]
        return rounded(shown)  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Results:
        """The results that `to_dict` and JSON made `fields` from.

        Raises:
            ResultsError: they are none, or of another version.
        """
        try:
            if (fields["schema"], fields["kind"]) != (SCHEMA, "step"):
                raise ResultsError(
                    f"these are results of kind {fields['kind']!r}, schema {fields['schema']}: "
                    f"this version reads kind 'step', schema {SCHEMA}"
                )
            setting = Setting(**{name: fields[name] for name in Setting.__dataclass_fields__})
            runs = tuple(_run(run) for run in fields["runs"])
            return cls(setting, fields["model"], fields["hosts"], runs)
        except (KeyError, TypeError) as error:
            raise ResultsError(f"these are no results: {error!r}") from error

    def write(self, path: Path) -> None:
        """Write JSON, with a line for each sample."""
        path.write_text(dumps(self.to_dict()), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read what `write` wrote."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ResultsError(f"{path} is no JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ResultsError(f"{path} holds no results")
        return cls.from_dict(fields)


def headlines(results: Results) -> list[str]:
    """For each network, what a reader wants to know first, in a sentence."""
    return [_headline(results, run) for run in results.runs]


def _headline(results: Results, run: Run) -> str:
    where = f"On {results.hosts} hosts {run.place}"
    if not run.schemes:
        return f"{where}, no scheme was measured."
    if run.dense is not None:
        return f"{where}, {comparison(run)}."
    best, *others = run.schemes
    took, times = say_seconds(best.median), best.median / run.floor.median
    tied = ties(best.timing, {one.name: one.timing for one in others})
    return f"{where}, a step takes {took} with {best.name}, {times:.2f}× compute alone{tied}."


def comparison(run: Run) -> str:
    """The fastest scheme beside dense DDP, which both took part."""
    (best, *others), dense = run.schemes, run.dense
    assert dense is not None
    fast, slow = say_seconds(best.median, dense.median), say_seconds(dense.median, best.median)
    found = conclusion(best.timing, dense.timing, {one.name: one.timing for one in others})
    return f"a step takes {fast} with {best.name}, {slow} with dense DDP: {found}"


def remarks(run: Run) -> list[str]:
    """What else is to be said about a network, whoever it speaks for."""
    said = []
    if run.schemes:
        best, dense = run.schemes[0], run.dense
        for one in sorted(run.peers, key=lambda one: one.median):
            times = f"{say_seconds(one.median)} against {say_seconds(best.median)}"
            if one.timing.beats(best.timing):
                said.append(f"{one.name} is faster than {best.name}: {times}.")
            elif not best.timing.beats(one.timing):
                said.append(f"{one.name} cannot be told apart from {best.name}: {times}.")
        slower = [one.name for one in run.schemes if dense and dense.timing.beats(one.timing)]
        if slower:
            said.append(f"Slower than dense DDP: {', '.join(slower)}.")
        said.append(
            f"Compute alone takes {say_seconds(run.floor.median)}; {best.name} takes "
            f"{best.median / run.floor.median:.2f} times that."
        )
    said += [f"{one.name} failed: {one.failed}" for one in run.failed]
    for link in run.links:
        if not link.fits:
            said.append(f"The link of {link.name} is more than 10 % off its rate.")
    return said


def say_seconds(seconds: float, beside: float = 0.0) -> str:
    """A time for people, in the unit that suits the larger of it and its neighbour.

    >>> say_seconds(0.687), say_seconds(0.687, beside=2.26), say_seconds(12.34)
    ('687 ms', '0.69 s', '12.3 s')
    """
    if max(seconds, beside) >= 1:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    milliseconds = 1000 * seconds
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2}f} ms"


def place_in_words(network: str, rate: int | None) -> str:
    """A network for people: "at 1 Gbit/s"."""
    if network == "loopback":
        return "over loopback"
    return "over unshaped links" if rate is None else f"at {say_rate(rate)}"


def say_rate(bits: float) -> str:
    """A rate for people.

    >>> say_rate(10**9), say_rate(957.3e6)
    ('1 Gbit/s', '957 Mbit/s')
    """
    for size, unit in ((10**9, "Gbit/s"), (10**6, "Mbit/s"), (10**3, "kbit/s")):
        if bits >= size:
            return f"{float(f'{bits / size:.3g}'):g} {unit}"
    return f"{bits:.0f} bit/s"


def dumps(content: object) -> str:
    """JSON that people can read: every sample, and everything short, on one line."""
    return _lines(content, "") + "\n"


def _lines(value: object, indent: str) -> str:
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) + len(indent) <= 100 or not isinstance(value, (dict, list)):
        return flat
    if isinstance(value, dict) and "seconds" in value:
        return flat
    deeper = indent + "  "
    if isinstance(value, dict):
        items: Iterable[str] = (
            f"{deeper}{json.dumps(key, ensure_ascii=False)}: {_lines(item, deeper)}"
            for key, item in value.items()
        )
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    items = (f"{deeper}{_lines(item, deeper)}" for item in value)
    return "[\n" + ",\n".join(items) + f"\n{indent}]"


def rounded(value: Any) -> Any:
    """Times to the microsecond: what comes after is noise, and long."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


def _run(fields: dict[str, Any]) -> Run:
    contenders = tuple(
        Contender(one["name"], tuple(map(sample, one["samples"])), one["failed"])
        for one in fields["contenders"]
    )
    links = tuple(Link(**link) for link in fields["links"])
    return Run(fields["network"], fields["rate"], links, contenders)


def sample(fields: dict[str, Any]) -> Sample:
    """A sample from a record or from JSON."""
    return Sample(**{**fields, "ranks": tuple(fields["ranks"])})
