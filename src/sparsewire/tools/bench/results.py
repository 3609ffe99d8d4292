"""The model of results of `bench step`, `bench train` and `bench scale`, and its JSON.

A `Results` has runs, one for each network; a run has contenders; a contender has samples (steps)
or points (tests). The columns in `step/`, `train/` and `scale/` compute with them, and `kinds.py`
writes their values into the same file.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from sparsewire.errors import SparsewireError

from ..lab import Link
from .contenders import COMPUTE, DENSE, kind
from .setting import Setting
from .step.stopwatch import PARTS
from .timing import Timing
from .words import place_in_words

SCHEMA = 3
FACTS = {
    "step": (),
    "train": ("target", "limit_steps"),
    "scale": ("alone", "most", "buckets"),
}
"""The kinds of results, and the facts that each has besides its runs."""


class ResultsError(SparsewireError, ValueError):
    """A file without results, or with results of another version."""


@dataclass(frozen=True)
class Sample:
    """One step as the mean over all ranks, and how long each of them took."""

    round: int
    seconds: float
    ranks: Sequence[float]
    parts: dict[str, float]
    busy: dict[str, float]
    hidden: dict[str, float]
    payload: float
    wire: float | None


@dataclass(frozen=True)
class Point:
    """A training at one test; bytes are those that one host has sent so far."""

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
class Contender:
    """The measurements of one contender on one network; `failed` is the reason if it failed."""

    name: str
    samples: tuple[Sample, ...] = ()
    points: tuple[Point, ...] = ()
    failed: str | None = None

    @property
    def kind(self) -> str:
        """Whether it is the "floor", a "peer" or a "scheme"."""
        return kind(self.name)

    @cached_property
    def timing(self) -> Timing:
        """The time of a step, or of the whole training, with its spread."""
        if self.points:
            return _arrival(self.points)
        return Timing.of([sample.seconds for sample in self.samples])

    @property
    def median(self) -> float:
        """Seconds of the median step."""
        return self.timing.seconds

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
        """The share of the exchange that ran during backward."""
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

    @property
    def last(self) -> Point:
        """The last point of its training."""
        return self.points[-1]


def _arrival(points: tuple[Point, ...]) -> Timing:
    """Return when a training reached its last point, which lies after the test before it.

    The spread covers all steps between the two tests, at the quartiles of the time per step.
    """
    if len(points) < 2:
        return Timing(0.0, 0.0, 0.0)
    before, last = points[-2:]
    step = Timing.of([(b.seconds - a.seconds) / (b.step - a.step) for a, b in pairwise(points)])
    low = min(before.seconds, step.low * before.step)
    return Timing(last.seconds, low, max(last.seconds, step.high * last.step))


@dataclass(frozen=True)
class Run:
    """All contenders on one network; `rate` is None for links as fast as the machine."""

    hosts: int
    network: str  # "lab" or "loopback"
    rate: int | None
    links: tuple[Link, ...]
    contenders: tuple[Contender, ...]

    @property
    def finished(self) -> list[Contender]:
        """The contenders that finished, in the order of the command line."""
        return [one for one in self.contenders if (one.samples or one.points) and not one.failed]

    @property
    def failed(self) -> list[Contender]:
        """The contenders that failed."""
        return [one for one in self.contenders if one not in self.finished]

    @property
    def floor(self) -> Contender:
        """Compute alone."""
        return self.named(COMPUTE) or self.contenders[0]

    @property
    def dense(self) -> Contender | None:
        """Dense DDP, if it was measured."""
        return self.named(DENSE)

    @property
    def schemes(self) -> list[Contender]:
        """sparsewire's schemes that finished, the fastest first."""
        schemes = [one for one in self.finished if one.kind == "scheme"]
        return sorted(schemes, key=lambda one: one.median)

    @property
    def peers(self) -> list[Contender]:
        """torch's own hooks that finished, besides dense DDP."""
        return [one for one in self.finished if one.kind == "peer" and one.name != DENSE]

    @property
    def place(self) -> str:
        """The network in words."""
        return place_in_words(self.network, self.rate)

    def named(self, name: str) -> Contender | None:
        """Return the contender of that name, if it finished."""
        return next((one for one in self.finished if one.name == name), None)

    def against_dense(self, one: Contender) -> str:
        """Compare a contender with dense DDP in a word or two; return nothing for a floor."""
        if self.dense is None or one is self.dense or one.kind == "floor":
            return ""
        return one.timing.verdict(self.dense.timing)


@dataclass(frozen=True)
class Results:
    """One measurement: `kind` is "step", "train" or "scale", `facts` what that kind adds."""

    kind: str
    setting: Setting
    model: dict[str, Any]
    runs: tuple[Run, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Results:
        """Return the results that JSON describes, of this schema or an earlier one.

        Raises:
            ResultsError: they are none, or of a version that this one cannot read.
        """
        try:
            fields = _upgraded(fields)
            return cls(
                fields["kind"],
                Setting(**{name: fields[name] for name in Setting.__dataclass_fields__}),
                fields["model"],
                tuple(map(_run, fields["runs"])),
                {name: fields[name] for name in FACTS[fields["kind"]]},
            )
        except (KeyError, TypeError) as error:
            raise ResultsError(f"these are no results: {error!r}") from error

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a results.json, as `from_dict` does."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ResultsError(f"{path} is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ResultsError(f"{path} holds no results")
        return cls.from_dict(fields)


def _upgraded(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of any version as those of this one."""
    kind, schema = fields["kind"], fields["schema"]
    if kind in FACTS and schema == SCHEMA:
        return fields
    if (kind, schema) == ("step", 1):
        runs = [{"hosts": fields["hosts"], **run} for run in fields["runs"]]
    elif (kind, schema) == ("scale", 1):
        runs = [{"hosts": size["hosts"], **run} for size in fields["sizes"] for run in size["runs"]]
    elif (kind, schema) == ("train", 2):
        names = ("hosts", "network", "rate", "links", "contenders")
        runs = [{name: fields[name] for name in names}]
    else:
        raise ResultsError(
            f"these are results of kind {kind!r}, schema {schema}; "
            f"this version of sparsewire reads {', '.join(FACTS)} up to schema {SCHEMA}"
        )
    return {**fields, "runs": runs}


def _run(fields: dict[str, Any]) -> Run:
    return Run(
        fields["hosts"],
        fields["network"],
        fields["rate"],
        tuple(Link(**link) for link in fields["links"]),
        tuple(
            Contender(
                one["name"],
                tuple(Sample(**sample) for sample in one.get("samples", ())),
                tuple(Point(**point) for point in one.get("points", ())),
                one["failed"],
            )
            for one in fields["contenders"]
        ),
    )


def dumps(content: object) -> str:
    """Return JSON that people can read: every sample, and everything short, on one line."""
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
    """Round times to the microsecond; smaller digits are noise."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value
