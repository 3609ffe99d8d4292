"""What one run is to do, decided and checked before any process starts.

A `Plan` is plain data: the parent writes it as JSON, every worker reads it, the metrics and
the checkpoints record it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..tasks.training import Recipe
from .errors import USAGE, CommandError
from .options import Train, Training
from .site import check_hosts, read_rate

_RATES = {"sgd": 0.2, "adagrad": 0.02}
# What may differ between a run and the one that goes on from its checkpoint: how long it
# trains and where things lie, but nothing that changes what a step does.
_FREE_ON_RESUME = {
    "epochs",
    "data",
    "timeout",
    "rate",
    "checkpoint",
    "checkpoint_every",
    "resume",
}


@dataclass(frozen=True)
class Plan:
    """One training run, the same for every rank."""

    scheme: str
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    optimizer: str
    hidden: tuple[int, ...]
    seed: int
    limit: int | None
    data: str
    timeout: float
    rate: str | None = None
    checkpoint: str | None = None
    checkpoint_every: int | None = None
    resume: bool = False

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Plan:
        """The plan that `asdict` and JSON made `fields` from."""
        return cls(**{**fields, "hidden": tuple(fields["hidden"])})

    def recipe(self) -> Recipe:
        """How its network is trained."""
        return Recipe(
            model="mnist",
            hidden=self.hidden,
            seed=self.seed,
            data=self.data,
            batch_size=self.batch_size,
            optimizer=self.optimizer,
            lr=self.lr,
            momentum=self.momentum,
            limit=self.limit,
        )

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must share with this run to be of use, as JSON would hold it."""
        kept = {name: value for name, value in asdict(self).items() if name not in _FREE_ON_RESUME}
        return {**kept, "hidden": list(self.hidden)}


def make(options: Training, scheme: str, data: Path) -> Plan:
    """The plan for one canonical `scheme` text under `options`."""
    plan = Plan(
        scheme=scheme,
        epochs=options.epochs,
        batch_size=options.batch_size,
        lr=_RATES[options.optimizer] if options.lr is None else options.lr,
        momentum=options.momentum if options.optimizer == "sgd" else 0.0,
        optimizer=options.optimizer,
        hidden=options.hidden,
        seed=options.seed,
        limit=options.limit,
        data=str(data.resolve()),
        timeout=options.timeout,
        rate=options.rate,
    )
    if not isinstance(options, Train):
        return plan
    return Plan(
        **{
            **asdict(plan),
            "checkpoint": str(options.checkpoint.resolve()) if options.checkpoint else None,
            "checkpoint_every": options.checkpoint_every,
            "resume": options.resume,
        }
    )


def check(options: Training) -> None:
    """Refuse options that do not go together, each with what would.

    Raises:
        CommandError: with the first that is wrong.
    """
    check_hosts(options.workers, "--workers")
    if isinstance(options, Train) and options.checkpoint is None:
        if options.checkpoint_every is not None:
            raise CommandError(
                "--checkpoint-every needs --checkpoint DIR, the folder to save in", USAGE
            )
        if options.resume:
            raise CommandError("--resume needs --checkpoint DIR, the folder to go on from", USAGE)
    if options.rate is not None:
        read_rate(options.rate)
