"""The plan of one run, decided and checked before any process starts.

A `Plan` is plain data: the parent writes it as JSON, every worker reads it, the metrics and
the checkpoints record it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..tasks.training import Recipe
from .errors import USAGE, CommandError
from .options import Train, Training
from .site import check_hosts, read_rate

_RATES = {"sgd": 0.2, "adagrad": 0.02}
# These determine every step: a checkpoint can only be resumed with the same values.
_OF_STEPS = ("scheme", "batch_size", "lr", "momentum", "optimizer", "hidden", "seed", "limit")


@dataclass(frozen=True, kw_only=True)
class Plan(Recipe):
    """One training run, the same for every rank."""

    model: str = "mnist"
    scheme: str
    epochs: int
    timeout: float
    rate: str | None = None
    checkpoint: str | None = None
    checkpoint_every: int | None = None
    resume: bool = False

    def identity(self) -> dict[str, Any]:
        """Return the values that a checkpoint must share with this run, as in JSON."""
        return {**{name: getattr(self, name) for name in _OF_STEPS}, "hidden": list(self.hidden)}


def make(options: Training, scheme: str, data: Path) -> Plan:
    """The plan for one canonical `scheme` text under `options`."""
    known = {field.name for field in fields(Plan)}
    given = {name: value for name, value in vars(options).items() if name in known}
    checkpoint = given.get("checkpoint")
    return Plan(
        **{
            **given,
            "scheme": scheme,
            "lr": _RATES[options.optimizer] if options.lr is None else options.lr,
            "momentum": options.momentum if options.optimizer == "sgd" else 0.0,
            "data": str(data.resolve()),
            "checkpoint": checkpoint and str(checkpoint.resolve()),
        }
    )


def check(options: Training) -> None:
    """Raise an error for options that exclude each other or need another one."""
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
