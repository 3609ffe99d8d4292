"""Segments: how a flat gradient is partitioned, and how many coordinates each segment sends.

A scope is a partition: one segment per tensor (`layer`), one for everything (`global`), or chunks
of a fixed length. One kernel serves all of them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor

from .randomness import name_key
from .workspace import Workspace

__all__ = ["ParamSlice", "Segment", "Segments"]

Scope = Literal["layer", "global"] | int
Shape = Sequence[int]
SEEN = 20  # coordinates above a threshold: with fewer, their number varies by more than a quarter


class Counts(Protocol):
    """The sizes that a selector decides: entries to send, and slots for them."""

    def entries(self, length: int) -> int: ...

    def capacity(self, length: int) -> int: ...


@dataclass(frozen=True)
class ParamSlice:
    """The position of one parameter in the flat gradient.

    Arguments:
        name: The name of the parameter.
        shape: Its shape.
        start: The coordinate of its first element.
    """

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def length(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the coordinate of the last element."""
        return self.start + self.length


@dataclass(frozen=True)
class Segment:
    """A run of the flat gradient from which coordinates are selected.

    Arguments:
        name: The name of the parameter, with the start of a chunk; `'*'` for the whole model.
        start: The first coordinate.
        length: The number of coordinates.
        count: How many of them to send.
        capacity: How many slots a message has for them.
    """

    name: str
    start: int
    length: int
    count: int
    capacity: int

    @property
    def stop(self) -> int:
        """One past the last coordinate."""
        return self.start + self.length


@dataclass(frozen=True)
class Segments:
    """A partition of the flat gradient into segments, which selectors work on.

    `Segments.partition` and `Scheme.partition` make one.

    Arguments:
        params: The positions of the parameters.
        sparse: The segments that coordinates are selected from.
        dense: The segments that are sent densely.

    >>> import sparsewire as sw
    >>> shapes = {"w": (100, 50), "b": (50,)}
    >>> segments = sw.segments.Segments.partition(shapes, sw.TopK(0.01))
    >>> [(segment.name, segment.length, segment.count) for segment in segments.sparse]
    [('w', 5000, 50)]
    >>> [segment.name for segment in segments.dense]
    ['b']
    """

    params: tuple[ParamSlice, ...]
    sparse: tuple[Segment, ...]
    dense: tuple[Segment, ...]

    @staticmethod
    def partition(
        shapes: Mapping[str, Shape],
        counts: Counts,
        scope: Scope = "layer",
        dense_below: int = 1024,
        dense_1d: bool = True,
    ) -> Segments:
        """Partition parameters in the given order.

        With a global scope, tensors that are sent densely come last, so that the one segment is
        contiguous. A segment that would send all of its coordinates is sent densely too.

        Arguments:
            shapes: The shapes of the parameters by name.
            counts: A selector, which decides how many coordinates each segment sends.
            scope: `'layer'`, `'global'`, or the length of chunks, as for `Scheme`.
            dense_below: Tensors with fewer elements than this are sent densely.
            dense_1d: If True, one-dimensional tensors are sent densely too.
        """
        exempt = [
            (dense_1d and len(shape) < 2) or math.prod(shape) < dense_below
            for shape in shapes.values()
        ]
        order = list(zip(shapes.items(), exempt, strict=True))
        if scope == "global":
            order.sort(key=lambda entry: entry[1])  # stable: sparsified first
        params: list[ParamSlice] = []
        start = 0
        for (name, shape), _ in order:
            params.append(ParamSlice(name, tuple(shape), start))
            start = params[-1].stop

        ranges: list[tuple[str, int, int, bool]] = []
        if scope == "global":
            split = sum(s.length for s, (_, e) in zip(params, order, strict=True) if not e)
            ranges.append(("*", 0, split, False))
        for param, (_, is_exempt) in zip(params, order, strict=True):
            if is_exempt:
                ranges.append((param.name, param.start, param.length, True))
            elif scope == "layer":
                ranges.append((param.name, param.start, param.length, False))
            elif isinstance(scope, int):
                for at in range(0, param.length, scope):
                    length = min(scope, param.length - at)
                    ranges.append((f"{param.name}[{at}]", param.start + at, length, False))

        sparse: list[Segment] = []
        dense: list[Segment] = []
        for name, begin, length, is_exempt in ranges:
            if length == 0:
                continue
            count = length if is_exempt else counts.entries(length)
            if count >= length:
                dense.append(Segment(name, begin, length, length, length))
            else:
                sparse.append(Segment(name, begin, length, count, counts.capacity(length)))
        return Segments(tuple(params), tuple(sparse), tuple(dense))

    @property
    def size(self) -> int:
        """The length of the flat gradient."""
        return self.params[-1].stop if self.params else 0

    def param_at(self, place: int) -> int:
        """Return the number of the parameter that a coordinate belongs to."""
        return bisect_right(self._starts, place) - 1

    @cached_property
    def _starts(self) -> list[int]:
        return [param.start for param in self.params]

    @cached_property
    def capacity(self) -> int:
        """The number of slots for selected entries in one message."""
        return sum(segment.capacity for segment in self.sparse)

    @cached_property
    def dense_size(self) -> int:
        """The number of values that are sent densely."""
        return sum(segment.length for segment in self.dense)

    @cached_property
    def dense_runs(self) -> tuple[tuple[int, int], ...]:
        """The dense segments as (start, stop), with adjacent ones joined."""
        runs: list[tuple[int, int]] = []
        for segment in sorted(self.dense, key=lambda p: p.start):
            if runs and runs[-1][1] == segment.start:
                runs[-1] = (runs[-1][0], segment.start + segment.length)
            else:
                runs.append((segment.start, segment.start + segment.length))
        return tuple(runs)

    @cached_property
    def grids(self) -> tuple[tuple[int, int, int, int], ...]:
        """Adjacent segments of the same size, as (start, rows, length, count)."""
        grids: list[tuple[int, int, int, int]] = []
        for segment in self.sparse:
            if grids:
                start, rows, length, count = grids[-1]
                same = (segment.length, segment.count) == (length, count)
                if same and segment.start == start + rows * length:
                    grids[-1] = (start, rows + 1, length, count)
                    continue
            grids.append((segment.start, 1, segment.length, segment.count))
        return tuple(grids)

    def strides(self, sample: int) -> tuple[int, ...]:
        """Return the sampling stride for each segment.

        The samples have about `sample` coordinates in all, divided by length. A segment gets more
        if fewer than `SEEN` of its sample would be among the coordinates to send. A stride is
        coprime to the sizes of the tensor, so that it does not see the same columns only.

        :meta private:
        """
        total = sum(segment.length for segment in self.sparse)
        return tuple(
            _coprime(max(1, min(segment.count // SEEN, total // sample)), 6 * segment.length)
            for segment in self.sparse
        )

    def table(self, device: torch.device, work: Workspace) -> SegmentTable:
        """Return the columns of `sparse` as tensors on a device, kept in a rank's workspace."""
        return work.kept(self, ("table", device), lambda: SegmentTable.of(self.sparse, device))

    def views(self, flat: Tensor) -> Iterable[tuple[ParamSlice, Tensor]]:
        """Return each parameter's position and its view of the flat gradient."""
        for param in self.params:
            yield param, flat[param.start : param.stop]


def _coprime(most: int, other: int) -> int:
    """Return the largest number up to `most` that is coprime to another number.

    >>> _coprime(111, 6 * 512 * 512 * 9), _coprime(4, 6)
    (109, 1)
    """
    return next(number for number in range(most, 0, -1) if math.gcd(number, other) == 1)


@dataclass(frozen=True)
class SegmentTable:
    """The columns of `Segments.sparse` as tensors, and the segment that each entry belongs to."""

    keys: Tensor
    starts: Tensor
    lengths: Tensor
    counts: Tensor
    capacities: Tensor
    owner: Tensor  # entry -> segment, for selectors that fill every slot
    place: Tensor  # entry -> its position inside the segment's entries

    @staticmethod
    def of(segments: Sequence[Segment], device: torch.device) -> SegmentTable:
        def column(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int64, device=device)

        counts = column(p.count for p in segments)
        owner = torch.repeat_interleave(torch.arange(len(segments), device=device), counts)
        first = torch.cumsum(counts, 0) - counts
        place = torch.arange(owner.numel(), device=device) - first[owner]
        return SegmentTable(
            keys=column(name_key(p.name) for p in segments),
            starts=column(p.start for p in segments),
            lengths=column(p.length for p in segments),
            counts=counts,
            capacities=column(p.capacity for p in segments),
            owner=owner,
            place=place,
        )


@dataclass(frozen=True)
class TileTable:
    """Runs of coordinates within one parameter and one segment, as ascending int64 columns."""

    starts: Tensor
    stops: Tensor
    params: Tensor
    segments: Tensor  # -1 where the segment is sent densely
    dense: Tensor  # where a whole tile's values begin among the dense values, else -1

    @staticmethod
    def of(segments: Segments, device: torch.device, length: int) -> TileTable:
        marks = {segment.start: (number, -1) for number, segment in enumerate(segments.sparse)}
        at = 0
        for whole in segments.dense:
            marks[whole.start] = (-1, at)
            at += whole.length
        rows: list[tuple[int, int, int, int, int]] = []
        segment, first, begin = -1, -1, 0
        edges = sorted({*marks, *(s.start for s in segments.params if s.length), segments.size})
        param = 0
        for start, stop in pairwise(edges):
            if start in marks:
                (segment, first), begin = marks[start], start
            while not segments.params[param].start <= start < segments.params[param].stop:
                param += 1
            for low in range(start, stop, length):
                place = first + low - begin if segment < 0 else -1
                rows.append((low, min(low + length, stop), param, segment, place))
        table = torch.tensor(rows, dtype=torch.int64).view(-1, 5).T.contiguous().to(device)
        return TileTable(*table)
