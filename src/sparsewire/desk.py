"""Writing one rank's message, reading everybody's, and putting the mean into the gradient.

Nothing that arrives is believed: every message is checked from its digest to its last value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import kernels
from .collectives.sums import Total
from .form import Form
from .kernels.reference import finite
from .message import (
    FINE,
    REASONS,
    VALUES,
    Context,
    damage_code,
    first_damage,
)
from .meter import Meter
from .segments import Segments, Span
from .selectors import Coordination, Draw, Selector
from .values import Place
from .workspace import Workspace


@dataclass(frozen=True)
class Call:
    """Which exchange this is: the `step` and `bucket`, on `rank` of `world`.

    `opens`: it is the first one of its step.
    """

    step: int
    rank: int
    world: int
    bucket: int = 0
    opens: bool = True


@dataclass
class Desk:
    """Writes and reads the messages of one exchange, and writes the mean into the gradient.

    What it finds wrong, in `damage` and `unsound`, stays on the gradient's device: the ranks
    compare it when the step is over, and the mean is written without waiting for that.
    """

    form: Form
    selector: Selector
    seed: int
    call: Call
    context: Context
    gradient: Tensor
    ledger: Tensor
    meter: Meter
    work: Workspace

    def __post_init__(self) -> None:
        self.rank, self.world = self.call.rank, self.call.world
        self.share = 1 / self.world
        self.damage = self.unsound = torch.full((), FINE, device=self.gradient.device)
        self._own: tuple[Tensor, Tensor] | None = None  # what this rank wrote, as others read it

    def write(self, indices: Tensor, values: Tensor) -> Tensor:
        with self.meter.stage("encode"):
            data = self._encode(indices, values)
            return self.form.write(indices, data, self.context.key(self.call.rank))

    def read(self, messages: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        with self.meter.stage("decode"):
            own = self.call.rank if self._own is not None else len(messages)
            entries = [
                self._own if self._own is not None and rank == own else self._entries(message, rank)
                for rank, message in enumerate(messages)
            ]
            fine = torch.ones(1, len(REASONS), dtype=torch.bool, device=self.gradient.device)
            left = self._inspect(messages[:own], entries[:own], 0)
            right = self._inspect(messages[own + 1 :], entries[own + 1 :], own + 1)
            rows = [rows for rows in (left, fine, right) if len(rows)]
            self._remember(first_damage(torch.cat(rows)))
            return entries

    def open(self, message: Tensor, rank: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Indices and values of one message, and whether it is fine in every one of `REASONS`."""
        entries = self._entries(message, rank)
        return *entries, list(self._inspect([message], [entries], rank)[0])

    def _inspect(
        self, messages: Sequence[Tensor], entries: Sequence[tuple[Tensor, Tensor]], first: int
    ) -> Tensor:
        return inspect(self.form, messages, entries, self.context.common, first)

    def _entries(self, message: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        draw = Draw(self.seed, self.call.step, rank)

        def coordinates() -> Tensor:
            if self.selector.coordination is Coordination.NEGOTIATED:
                assert self._own is not None
                return self._own[0]
            return self.selector.coordinates(self.form.segments, draw, message.device)

        key = draw.key(shared=False)
        return read(self.form, message, coordinates, key, self.ledger.dtype)

    def check(self, total: Total) -> Tensor:
        with self.meter.stage("decode"):
            self._remember(total.damage)
            overflow = damage_code(self.call.rank, VALUES)
            self._remember(torch.where(finite(total.values), FINE, overflow))
            return total.values

    def _remember(self, damage: Tensor) -> None:
        """Keep the first damage."""
        self.damage = torch.where(self.damage == FINE, damage, self.damage)

    def narrow(self, indices: Tensor, values: Tensor) -> Tensor:
        with self.meter.stage("encode"):
            return self._encode(indices, values).view(self.form.values.dtype)

    def apply(self, entries: Sequence[tuple[Tensor, Tensor]], share: float) -> None:
        with self.meter.stage("decode"):
            kernel = kernels.on(self.gradient.device)
            kernel.add_up(self.gradient, entries, share, self.form.segments)

    def _encode(self, indices: Tensor, values: Tensor) -> Tensor:
        """Values as bytes; what the codec changed goes back into the ledger."""
        key = Draw(self.seed, self.call.step, self.call.rank).key(shared=False)
        data, values, errors = write(self.form, indices, values, key)
        if errors is not None:
            kernels.on(errors.device).put_back(self.ledger, indices, errors, self.form.segments)
        self._own = (indices, values)
        return data


def write(
    form: Form, indices: Tensor, values: Tensor, key: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values as bytes, as others will read them, and what the codec changed, if it ever does."""
    place = Place(indices, form.segments, key)
    data = form.values.encode(values, place)
    if form.values.exact(values.dtype):
        return data, values, None
    read = form.values.decode(data, place, values.dtype)
    return data, read, values - read


def read(
    form: Form,
    message: Tensor,
    coordinates: Callable[[], Tensor],
    key: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The entries of a message; its indices are the `coordinates` unless they are written."""
    if message.numel() != form.nbytes:
        nothing = message.new_empty(0)
        return nothing, nothing
    places, data = form.cut(message)
    written = form.indices.written
    indices = form.indices.decode(places, form.segments) if written else coordinates()
    return indices, form.values.decode(data, Place(indices, form.segments, key), dtype)


def inspect(
    form: Form,
    messages: Sequence[Tensor],
    entries: Sequence[tuple[Tensor, Tensor]],
    key: int,
    first: int,
) -> Tensor:
    """For every message whether it is fine in every one of `REASONS`, from sender `first` on."""
    if not messages:
        return torch.empty(0, len(REASONS), dtype=torch.bool)
    if not form.indices.written:
        entries = [(indices[:0], values) for indices, values in entries]
    kernel = kernels.on(messages[0].device)
    return kernel.inspect(messages, entries, key, first, form.nbytes, form.segments.size)


def leave_out(unused: Sequence[Span], indices: Tensor, values: Tensor, segments: Segments) -> None:
    """Send nothing of these parameters."""
    names = {span.name for span in unused}
    for span in segments.spans:
        if span.name not in names:
            continue
        inside = (indices >= span.start) & (indices < span.stop)
        values[: indices.numel()][inside] = 0
        at = indices.numel()
        for start, stop in segments.whole_runs:
            low, high = max(start, span.start), min(stop, span.stop)
            if low < high:
                values[at + low - start : at + high - start] = 0
            at += stop - start
