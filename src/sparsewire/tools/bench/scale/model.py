"""The cost of an exchange beyond compute alone: a sum of terms, fitted to measurements.

With W hosts on C cores, s = max(1, W/C) is how many hosts a core serves, and

    step(W) − compute(W) ≈ a + l·hops + b·bytes + s·(c·bytes + d·looked_at + g·added)

No coefficient is below zero. They are the same for all contenders, who differ in their loads alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass

import numpy as np

from .loads import Load


@dataclass(frozen=True)
class Measured:
    """One measured step, and compute alone on the same number of hosts, in seconds."""

    load: Load
    share: float  # hosts that a core serves, at least 1
    compute: float
    step: float


@dataclass(frozen=True)
class Model:
    """Seconds for each unit of a load."""

    step: float  # a
    hop: float  # l
    byte: float  # b, on the link
    move: float  # c, a core's work for a byte
    look: float  # d
    addition: float  # g

    def beyond(self, load: Load, share: float = 1.0) -> float:
        """Return the seconds that a step with this load takes beyond compute alone."""
        return float(np.dot(_terms(load, share), astuple(self)))

    def to_dict(self) -> dict[str, float]:
        """Return the coefficients by name."""
        return asdict(self)


def share(hosts: int, cores: int) -> float:
    """Return how many hosts a core serves where `hosts` share `cores`.

    >>> share(8, 2), share(1, 2)
    (4.0, 1.0)
    """
    return max(1.0, hosts / cores)


def fit(points: Sequence[Measured]) -> Model:
    """Return the model with the least squared errors, each relative to the measured step."""
    from scipy.optimize import nnls  # takes 0.3 s, and only a finished measurement needs it

    rows = np.array([np.array(_terms(p.load, p.share)) / p.step for p in points])
    wanted = np.array([(p.step - p.compute) / p.step for p in points])
    scale = np.linalg.norm(rows, axis=0)  # terms differ by ten orders of magnitude
    scale[scale == 0] = 1.0
    found, _ = nnls(rows / scale, wanted)
    return Model(*(float(x) for x in found / scale))


def _terms(load: Load, share: float) -> tuple[float, ...]:
    return (
        1.0,
        load.hops,
        load.received,
        share * load.received,
        share * load.looked_at,
        share * load.added,
    )
