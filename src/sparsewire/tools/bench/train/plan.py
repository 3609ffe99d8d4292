"""What is to be trained by whom, and until when; plain data, the same for every rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

LEARNING_RATES = {"adagrad": 0.005, "sgd": 0.05, "adamw": 0.002}
MOMENTUM = 0.9  # of sgd, without which it gets there late
WARM_UP = 50  # steps in which the rate of adamw rises


@dataclass(frozen=True)
class Usual:
    """What a race takes where nothing else is said."""

    target: float
    schemes: tuple[str, ...]
    hidden: tuple[int, ...]
    batch_size: int
    optimizer: str
    limit_steps: int


USUAL = {
    "mnist": Usual(0.97, ("TopK(0.01)", "Threshold(0.01)"), (4096,) * 3, 40, "adagrad", 400),
    "gpt": Usual(
        1.9, ("updates Scheme(TopK(0.01), values=TwoBit())",), (128,) * 4, 8, "adamw", 2000
    ),
}


@dataclass(frozen=True)
class Plan:
    """One race.

    Args:
        model: what is trained, one of `GOALS`.
        contenders: who trains, one after the other.
        target: the score that ends a training.
        batch_size: examples per rank and step.
        hidden: widths of the layers.
        evaluate_every: steps between two looks at the test set.
        limit_steps: steps after which a training ends without the target.
        data: where the data are.
        timeout: seconds after which a step counts as hung.
    """

    model: str
    contenders: tuple[str, ...]
    target: float
    batch_size: int
    hidden: tuple[int, ...]
    optimizer: str
    lr: float
    evaluate_every: int
    limit_steps: int
    seed: int
    data: str
    timeout: float

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Plan:
        """The plan that `to_dict` and JSON made `fields` from."""
        lists = {name: tuple(fields[name]) for name in ("contenders", "hidden")}
        return cls(**{**fields, **lists})

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON can hold it."""
        return asdict(self)
