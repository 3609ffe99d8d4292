"""How a flat gradient is partitioned into segments, and how many coordinates each one sends.

Scope is a partition: `layer` (one segment per tensor), `global` (one for all) and chunks of a fixed
length are three kinds of it, so that one kernel serves them all.
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

Scope = Literal["layer", "global"] | int
Shape = Sequence[int]
SEEN = 20  # of a sample, a number that varies by a quarter


class Counts(Protocol):
    """What a selector says about sizes: entries wanted, and slots set aside for them."""

    def entries(self, length: int) -> int: ...

    def capacity(self, length: int) -> int: ...


@dataclass(frozen=True)
class ParamSlice:
    """One parameter's place in the flat gradient."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def length(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Segment:
    """A run of the flat gradient from which `count` coordinates are sent in `capacity` slots."""

    name: str
    start: int
    length: int
    count: int
    capacity: int

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Segments:
    """A partition of the gradient.

    Arguments:
        params: where the parameters lie.
        sparse: the segments that coordinates are selected from.
        dense: the segments that are sent densely.

    >>> from sparsewire import TopK
    >>> s = Segments.partition({"w": (100, 50), "b": (50,)}, TopK(0.01))
    >>> [(p.name, p.length, p.count) for p in s.sparse], [p.name for p in s.dense]
    ([('w', 5000, 50)], ['b'])
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
        """Partition parameters, given by name and shape, in the order given.

        Tensors of fewer than `dense_below` elements are sent densely, and with `dense_1d` so are
        1-D tensors of any size. With a `global` scope they lie behind all others, so that its one
        segment is contiguous. A segment that would send all it has is sent densely too.
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
        """Length of the flat gradient."""
        return self.params[-1].stop if self.params else 0

    def param_at(self, place: int) -> int:
        """The number of the parameter that a coordinate lies in."""
        return bisect_right(self._starts, place) - 1

    @cached_property
    def _starts(self) -> list[int]:
        return [param.start for param in self.params]

    @cached_property
    def capacity(self) -> int:
        """Slots for selected entries in one message."""
        return sum(segment.capacity for segment in self.sparse)

    @cached_property
    def dense_size(self) -> int:
        """Values that are sent densely."""
        return sum(segment.length for segment in self.dense)

    @cached_property
    def dense_runs(self) -> tuple[tuple[int, int], ...]:
        """The dense segments as (start, stop), neighbours joined."""
        runs: list[tuple[int, int]] = []
        for segment in sorted(self.dense, key=lambda p: p.start):
            if runs and runs[-1][1] == segment.start:
                runs[-1] = (runs[-1][0], segment.start + segment.length)
            else:
                runs.append((segment.start, segment.start + segment.length))
        return tuple(runs)

    @cached_property
    def grids(self) -> tuple[tuple[int, int, int, int], ...]:
        """Segments of one size that lie side by side, as (start, rows, length, count)."""
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
        """Every how manyth coordinate of each segment a sample looks at.

        There are about `sample` of them in all, shared out by length, and more where fewer than
        `SEEN` of a segment's would else be among those it wants to send. A stride has no factor in
        common with what tensors are made of, or it would see the same columns and taps only.
        """
        total = sum(segment.length for segment in self.sparse)
        return tuple(
            _coprime(max(1, min(segment.count // SEEN, total // sample)), 6 * segment.length)
            for segment in self.sparse
        )

    def table(self, device: torch.device, work: Workspace) -> SegmentTable:
        """The segments as tensors, one row each, kept for every later step."""
        return work.kept(self, ("table", device), lambda: SegmentTable.of(self.sparse, device))

    def views(self, flat: Tensor) -> Iterable[tuple[ParamSlice, Tensor]]:
        """The flat gradient parameter by parameter."""
        for param in self.params:
            yield param, flat[param.start : param.stop]


def _coprime(most: int, other: int) -> int:
    """The largest number up to `most` that has no factor in common with another.

    >>> _coprime(111, 6 * 512 * 512 * 9), _coprime(4, 6)
    (109, 1)
    """
    return next(number for number in range(most, 0, -1) if math.gcd(number, other) == 1)


@dataclass(frozen=True)
class SegmentTable:
    """The columns of `Segments.sparse` on a device, and which segment each entry belongs to."""

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
    """Runs of coordinates that lie in one parameter and in one segment, as int64 columns,
    ascending."""

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
