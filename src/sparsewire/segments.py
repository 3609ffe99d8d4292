"""How a flat gradient is cut into pieces, and how many coordinates each piece sends.

Scope is a segmentation: `layer` (one piece per tensor), `global` (one piece for all) and chunks
of a fixed length are three ways to cut, so that one kernel serves them all.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from .randomness import name_key

Scope = Literal["layer", "global"] | int
Shape = Sequence[int]
SEEN = 20  # of a sample, a number that varies by a quarter


class Counts(Protocol):
    """What a selector says about sizes: entries wanted, and slots set aside for them."""

    def entries(self, length: int) -> int: ...

    def room(self, length: int) -> int: ...


@dataclass(frozen=True)
class Span:
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
class Piece:
    """A run of the flat gradient from which `count` coordinates are sent in `room` slots."""

    name: str
    start: int
    length: int
    count: int
    room: int

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Segments:
    """A cut gradient: `spans` say where the parameters lie, `pieces` are selected from, and
    `whole` pieces travel entire.

    >>> from sparsewire import TopK
    >>> s = Segments.cut({"w": (100, 50), "b": (50,)}, TopK(0.01))
    >>> [(p.name, p.length, p.count) for p in s.pieces], [p.name for p in s.whole]
    ([('w', 5000, 50)], ['b'])
    """

    spans: tuple[Span, ...]
    pieces: tuple[Piece, ...]
    whole: tuple[Piece, ...]

    @staticmethod
    def cut(
        shapes: Mapping[str, Shape],
        counts: Counts,
        scope: Scope = "layer",
        whole: int | None = 1024,
    ) -> Segments:
        """Cut parameters, given by name and shape, in the order given.

        1-D tensors and tensors of fewer than `whole` elements travel whole; None switches that
        off. A `global` cut puts those behind all others, so that its one piece is contiguous.
        A piece that would send all it has travels whole too.
        """
        exempt = [
            whole is not None and (len(shape) < 2 or math.prod(shape) < whole)
            for shape in shapes.values()
        ]
        order = list(zip(shapes.items(), exempt, strict=True))
        if scope == "global":
            order.sort(key=lambda entry: entry[1])  # stable: sparsified first
        spans: list[Span] = []
        start = 0
        for (name, shape), _ in order:
            spans.append(Span(name, tuple(shape), start))
            start = spans[-1].stop

        ranges: list[tuple[str, int, int, bool]] = []
        if scope == "global":
            split = sum(s.length for s, (_, e) in zip(spans, order, strict=True) if not e)
            ranges.append(("*", 0, split, False))
        for span, (_, is_exempt) in zip(spans, order, strict=True):
            if is_exempt:
                ranges.append((span.name, span.start, span.length, True))
            elif scope == "layer":
                ranges.append((span.name, span.start, span.length, False))
            elif isinstance(scope, int):
                for at in range(0, span.length, scope):
                    length = min(scope, span.length - at)
                    ranges.append((f"{span.name}[{at}]", span.start + at, length, False))

        pieces: list[Piece] = []
        entire: list[Piece] = []
        for name, begin, length, is_exempt in ranges:
            if length == 0:
                continue
            count = length if is_exempt else counts.entries(length)
            if count >= length:
                entire.append(Piece(name, begin, length, length, length))
            else:
                pieces.append(Piece(name, begin, length, count, counts.room(length)))
        return Segments(tuple(spans), tuple(pieces), tuple(entire))

    @property
    def size(self) -> int:
        """Length of the flat gradient."""
        return self.spans[-1].stop if self.spans else 0

    def span_at(self, place: int) -> int:
        """The number of the span that a coordinate lies in."""
        return bisect_right(self._starts, place) - 1

    @cached_property
    def _starts(self) -> list[int]:
        return [span.start for span in self.spans]

    @cached_property
    def room(self) -> int:
        """Slots for selected entries in one message."""
        return sum(piece.room for piece in self.pieces)

    @cached_property
    def whole_size(self) -> int:
        """Values that travel whole."""
        return sum(piece.length for piece in self.whole)

    @cached_property
    def whole_runs(self) -> tuple[tuple[int, int], ...]:
        """The whole pieces as (start, stop), neighbours joined."""
        runs: list[tuple[int, int]] = []
        for piece in sorted(self.whole, key=lambda p: p.start):
            if runs and runs[-1][1] == piece.start:
                runs[-1] = (runs[-1][0], piece.start + piece.length)
            else:
                runs.append((piece.start, piece.start + piece.length))
        return tuple(runs)

    @cached_property
    def grids(self) -> tuple[tuple[int, int, int, int], ...]:
        """Pieces of one size that lie side by side, as (start, rows, length, count)."""
        grids: list[tuple[int, int, int, int]] = []
        for piece in self.pieces:
            if grids:
                start, rows, length, count = grids[-1]
                same = (piece.length, piece.count) == (length, count)
                if same and piece.start == start + rows * length:
                    grids[-1] = (start, rows + 1, length, count)
                    continue
            grids.append((piece.start, 1, piece.length, piece.count))
        return tuple(grids)

    def strides(self, sample: int) -> tuple[int, ...]:
        """Every how manyth coordinate of each piece a sample looks at.

        There are about `sample` of them in all, shared out by length, and more where fewer than
        `SEEN` of a piece's would else be among those it wants to send. A stride has no factor in
        common with what tensors are made of, or it would see the same columns and taps only.
        """
        if sample not in self._strides:
            total = sum(piece.length for piece in self.pieces)
            self._strides[sample] = tuple(
                _coprime(max(1, min(piece.count // SEEN, total // sample)), 6 * piece.length)
                for piece in self.pieces
            )
        return self._strides[sample]

    def table(self, device: torch.device) -> PieceTable:
        """The pieces as tensors, one row each, kept for every later step."""
        tables: dict[torch.device, PieceTable] = self._tables
        if device not in tables:
            tables[device] = PieceTable.of(self.pieces, device)
        return tables[device]

    def tiles(self, device: torch.device, length: int) -> TileTable:
        """The gradient in tiles of at most `length`, kept for every later step."""
        key = (device, length)
        if key not in self._tiles:
            self._tiles[key] = TileTable.of(self, device, length)
        return self._tiles[key]

    @cached_property
    def _strides(self) -> dict[int, tuple[int, ...]]:
        return {}

    @cached_property
    def _tables(self) -> dict[torch.device, PieceTable]:
        return {}

    @cached_property
    def _tiles(self) -> dict[tuple[torch.device, int], TileTable]:
        return {}

    @property
    def scratch(self) -> dict[object, Any]:
        """Where kernels keep buffers and guesses from step to step, every thread its own; losing
        them changes nothing."""
        threads = self._threads
        if not hasattr(threads, "scratch"):
            threads.scratch = {}
        mine: dict[object, Any] = threads.scratch
        return mine

    @cached_property
    def _threads(self) -> threading.local:
        return threading.local()

    def __getstate__(self) -> dict[str, Any]:
        """Without what is kept from step to step."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def views(self, flat: Tensor) -> Iterable[tuple[Span, Tensor]]:
        """The flat gradient parameter by parameter."""
        for span in self.spans:
            yield span, flat[span.start : span.stop]


def _coprime(most: int, other: int) -> int:
    """The largest number up to `most` that has no factor in common with another.

    >>> _coprime(111, 6 * 512 * 512 * 9), _coprime(4, 6)
    (109, 1)
    """
    return next(number for number in range(most, 0, -1) if math.gcd(number, other) == 1)


@dataclass(frozen=True)
class PieceTable:
    """The columns of `Segments.pieces` on a device, and which piece each entry belongs to."""

    keys: Tensor
    starts: Tensor
    lengths: Tensor
    counts: Tensor
    rooms: Tensor
    owner: Tensor  # entry -> piece, for selectors that fill every slot
    place: Tensor  # entry -> its position inside the piece's entries

    @staticmethod
    def of(pieces: Sequence[Piece], device: torch.device) -> PieceTable:
        def column(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int64, device=device)

        counts = column(p.count for p in pieces)
        owner = torch.repeat_interleave(torch.arange(len(pieces), device=device), counts)
        first = torch.cumsum(counts, 0) - counts
        place = torch.arange(owner.numel(), device=device) - first[owner]
        return PieceTable(
            keys=column(name_key(p.name) for p in pieces),
            starts=column(p.start for p in pieces),
            lengths=column(p.length for p in pieces),
            counts=counts,
            rooms=column(p.room for p in pieces),
            owner=owner,
            place=place,
        )


@dataclass(frozen=True)
class TileTable:
    """Runs of coordinates that lie in one span and in one piece, as int64 columns, ascending."""

    starts: Tensor
    stops: Tensor
    spans: Tensor
    pieces: Tensor  # -1 where the piece travels whole
    wholes: Tensor  # where a whole tile's values begin among the whole values, else -1

    @staticmethod
    def of(segments: Segments, device: torch.device, length: int) -> TileTable:
        marks = {piece.start: (number, -1) for number, piece in enumerate(segments.pieces)}
        at = 0
        for whole in segments.whole:
            marks[whole.start] = (-1, at)
            at += whole.length
        rows: list[tuple[int, int, int, int, int]] = []
        piece, first, begin = -1, -1, 0
        edges = sorted({*marks, *(s.start for s in segments.spans if s.length), segments.size})
        span = 0
        for start, stop in pairwise(edges):
            if start in marks:
                (piece, first), begin = marks[start], start
            while not segments.spans[span].start <= start < segments.spans[span].stop:
                span += 1
            for low in range(start, stop, length):
                place = first + low - begin if piece < 0 else -1
                rows.append((low, min(low + length, stop), span, piece, place))
        table = torch.tensor(rows, dtype=torch.int64).view(-1, 5).T.contiguous().to(device)
        return TileTable(*table)
