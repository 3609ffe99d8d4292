"""What exchanges cost and how large the residual is, as numbers and as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .counters import STAGES, Counters

__all__ = ["Report"]


def dense_traffic(values: int, world_size: int, width: int) -> int:
    """Return the bytes that each rank sends in a ring all-reduce of numbers of `width` bytes."""
    return math.ceil(2 * values * width * (world_size - 1) / world_size)


@dataclass(frozen=True)
class Report:
    """The running totals of one rank. `print(report)` shows them per step.

    Attributes:
        scheme: The scheme's text.
        world_size: The number of ranks that exchange.
        steps: The number of exchanges since `attach`.
        skipped: The number of steps that were skipped because of NaN or infinity.
        bytes_sent: Bytes that this rank sent, headers included.
        bytes_received: Bytes that this rank received.
        dense_bytes: Bytes that a ring all-reduce in float32 would have sent.
        selected: The number of coordinates that the selector chose, without tensors that are sent
            densely.
        aimed_at: The number of coordinates that it was asked for. `selected` may be more or less
            with `Threshold`, and less with `UnionTopK`.
        seconds: Seconds by stage: select, encode, exchange, decode.
        memory_norm: The norm of the residual.
        gradient_norm: The norm of this rank's last gradient, or update.
        layers: For each parameter its name, the norm of its residual and of its gradient; only
            with `wire.report(layers=True)`.
        every: The number of local steps between two exchanges; 1 if gradients are exchanged.
    """

    scheme: str
    world_size: int
    steps: int
    skipped: int
    bytes_sent: int
    bytes_received: int
    dense_bytes: int
    selected: int
    aimed_at: int
    seconds: Mapping[str, float]
    memory_norm: float
    gradient_norm: float
    layers: tuple[tuple[str, float, float], ...] = ()  # name, memory norm, gradient norm
    every: int = 1  # local steps in each of these, where updates are exchanged

    @staticmethod
    def of(
        scheme: str, counters: Counters, world_size: int, memory: Mapping[str, float], layers: bool
    ) -> Report:
        """Return a report from counters and the residual's sum of squares by parameter.

        :meta private:
        """
        gradient = counters.gradient_squares
        rows = tuple(
            (name, math.sqrt(memory.get(name, 0.0)), math.sqrt(gradient.get(name, 0.0)))
            for name in {**memory, **gradient}
        )
        return Report(
            scheme=scheme,
            world_size=world_size,
            steps=counters.steps,
            skipped=counters.skipped,
            bytes_sent=counters.bytes_sent,
            bytes_received=counters.bytes_received,
            dense_bytes=dense_traffic(counters.values, world_size, 4),
            selected=int(counters.selected),
            aimed_at=counters.aimed_at,
            seconds=dict(counters.seconds),
            memory_norm=math.sqrt(sum(memory.values())),
            gradient_norm=math.sqrt(sum(gradient.values())),
            layers=rows if layers else (),
        )

    @property
    def reduction(self) -> float:
        """How many times fewer bytes were sent than by a dense all-reduce in float32."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    def to_dict(self) -> dict[str, float]:
        """Return the totals as a flat dictionary of numbers."""
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "dense_bytes": self.dense_bytes,
            "selected": self.selected,
            "aimed_at": self.aimed_at,
            "reduction": self.reduction,
            **{f"seconds_{stage}": self.seconds[stage] for stage in STAGES},
            "memory_norm": self.memory_norm,
            "gradient_norm": self.gradient_norm,
        }

    def __str__(self) -> str:
        steps = max(1, self.steps + self.skipped)
        times = ", ".join(f"{s} {1e3 * self.seconds[s] / steps:.2f}" for s in STAGES)
        kind = "step" if self.every == 1 else "round"
        lines = [
            f"{self.scheme} on {plural(self.world_size, 'rank')}, {plural(self.steps, kind)}"
            + (f" of {self.every} local steps" if self.every > 1 else "")
            + (f", {self.skipped} skipped" if self.skipped else ""),
            f"  sent per {kind:<9} {human_bytes(self.bytes_sent / steps)}, received "
            f"{human_bytes(self.bytes_received / steps)}",
            f"  against dense      {self.reduction:.1f}x less than float32, "
            f"{self.reduction / 2:.1f}x less than bfloat16",
            f"  selected per {kind:<5} {self.selected / steps:,.0f}, aimed at "
            f"{self.aimed_at / steps:,.0f}",
            f"  milliseconds       {times}",
            f"  memory / gradient  {self.memory_norm:.3g} / {self.gradient_norm:.3g} (norms)",
        ]
        if self.layers:
            width = max(len(name) for name, _, _ in self.layers)
            lines.append(f"  {'parameter':<{width}}  {'memory':>9}  {'gradient':>9}")
            lines += [f"  {name:<{width}}  {m:9.3g}  {g:9.3g}" for name, m, g in self.layers]
        return "\n".join(lines)


def plural(number: int, noun: str, several: str | None = None) -> str:
    """Return a number and its noun in the singular or plural.

    >>> plural(1, "worker"), plural(2500, "worker"), plural(0, "index", "indices")
    ('1 worker', '2,500 workers', '0 indices')
    """
    return f"{number:,} {noun if number == 1 else several or f'{noun}s'}"


def human_bytes(count: float) -> str:
    """Return a number of bytes in a readable unit: 999 B, 1.2 kB, 3.4 MB, 5.6 GB.

    >>> human_bytes(1234567)
    '1.2 MB'
    """
    for unit, digits in (("B", 0), ("kB", 1), ("MB", 1)):
        if round(count, digits) < 1000:
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
