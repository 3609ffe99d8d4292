"""What is to be trained by whom, and until when; plain data, the same for every rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

LEARNING_RATES = {"adagrad": 0.005, "sgd": 0.05}
MOMENTUM = 0.9  # of sgd, without which it gets there late


@dataclass(frozen=True)
class Plan:
    """One race.

    Args:
        contenders: who trains, one after the other.
        target: the test accuracy that ends a training.
        batch_size: images per rank and step.
        evaluate_every: steps between two looks at the test set.
        limit_steps: steps after which a training ends without the target.
        data: the folder with MNIST.
        timeout: seconds after which a step counts as hung.
    """

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
