"""What an exchange costs beyond compute alone, as a sum of a few terms, fitted to measurements.

With W hosts on C cores, s = max(1, W/C) is how many hosts a core serves, and

    step(W) − compute(W) ≈ a + l·hops + b·bytes + s·(c·bytes + d·looked_at + g·added)

No coefficient is below zero. They are the same for all contenders, who differ in their loads alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from .loads import Load

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """One measured step beside compute alone with as many hosts, in seconds."""

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
        """Seconds that a step with this load takes beyond compute alone."""
        return float(np.dot(_terms(load, share), astuple(self)))

    def to_dict(self) -> dict[str, float]:
        """The coefficients by name."""
        return asdict(self)


def share(hosts: int, cores: int) -> float:
    """How many hosts a core serves where `hosts` share `cores`.

    >>> share(8, 2), share(1, 2)
    (4.0, 1.0)
    """
    return max(1.0, hosts / cores)


def fit(points: Sequence[Measured]) -> Model:
    """The model with the least squared errors, each as a share of the measured step."""
    rows = np.array([np.array(_terms(p.load, p.share)) / p.step for p in points])
    wanted = np.array([(p.step - p.compute) / p.step for p in points])
    return Model(*(float(x) for x in least_squares(rows, wanted)))


def least_squares(rows: Array, wanted: Array) -> Array:
    """The x ≥ 0 for which |rows·x − wanted| is least.

    At the minimum, what is not zero is a plain least-squares solution by itself; so it is enough to
    try every set of columns that may be not zero, of which a few columns have only a few.
    """
    count = rows.shape[1]
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(count), float(wanted @ wanted)
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            columns = list(chosen)
            found = np.linalg.lstsq(rows[:, columns] / scale[columns], wanted, rcond=None)[0]
            if (found < 0).any():
                continue
            tried = np.zeros(count)
            tried[columns] = found / scale[columns]
            missed = rows @ tried - wanted
            error = float(missed @ missed)
            if error < least * (1 - 1e-9):  # of equals, the one with fewer terms
                best, least = tried, error
    return best


def _terms(load: Load, share: float) -> tuple[float, ...]:
    return (
        1.0,
        load.hops,
        load.received,
        share * load.received,
        share * load.looked_at,
        share * load.added,
    )
