"""Which rank owns which coordinates, when a gradient is shared out among all of them.

Every parameter is dealt like a pack of cards: `CARD` coordinates at a time, one card to each rank
in a turn, and turns begin with different ranks. So every rank owns as much of the busy places of a
gradient as of the quiet ones, and who owns what depends on the parameter's name and size alone, not
on where DDP lays it.

An owner's coordinates make up a flat gradient of its own, in the same order, with `Segments` of its
own: selectors, codecs and kernels work on it as on any other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .kernels import reference
from .kernels.cards import CARD, card_key, owned
from .segments import Piece, Segments, Span

OWNED = "owned"  # what a rank remembers as the owner of coordinates
SLACK = 1.25  # room for what one rank sends one owner, against an equal share of its entries


@dataclass(frozen=True)
class Shards:
    """A gradient shared out among `world` owners.

    Arguments:
        segments: how the gradient is cut.
        world: how many owners there are.
        ratio: the share of its coordinates that an owner sends back; None: as many as a rank sends,
            1.0: all that it was sent.
        clustered: a rank's entries lie side by side, and may all fall on a few cards.
    """

    segments: Segments
    world: int
    ratio: float | None = None
    clustered: bool = False

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Where each owner's slots begin, and where the last one's end."""
        return tuple(itertools.accumulate((part.room for part in self._parts), initial=0))

    @cached_property
    def selected(self) -> Segments:
        """The gradient without what travels whole."""
        return replace(self.segments, whole=())

    def part(self, owner: int) -> Segments:
        """An owner's coordinates, with room for the entries that one rank sends it."""
        return self._parts[owner]

    def result(self, owner: int) -> Segments:
        """An owner's coordinates, with room for the entries that it sends back."""
        return self._results[owner]

    @cached_property
    def _parts(self) -> tuple[Segments, ...]:
        return tuple(self._cut(owner, is_result=False) for owner in range(self.world))

    @cached_property
    def _results(self) -> tuple[Segments, ...]:
        return tuple(self._cut(owner, is_result=True) for owner in range(self.world))

    def _cut(self, owner: int, is_result: bool) -> Segments:
        spans = self._spans[owner]
        pieces: list[Piece] = []
        entire: list[Piece] = []
        for piece, is_whole in self._pieces:
            start, stop = self.extent(piece, owner)
            length = stop - start
            if not length:
                continue
            count = room = self.part_room(piece, length)
            if is_result:
                count, room = self._result_room(piece, length, room)
            if is_whole or (is_result and count >= length):
                entire.append(Piece(piece.name, start, length, length, length))
            else:
                pieces.append(Piece(piece.name, start, length, count, room))
        return Segments(spans, tuple(pieces), tuple(entire))

    @cached_property
    def _spans(self) -> tuple[tuple[Span, ...], ...]:
        """Every owner's spans: what it owns of each parameter."""
        rows: list[tuple[Span, ...]] = []
        for owner in range(self.world):
            spans: list[Span] = []
            for span in self.segments.spans:
                start = spans[-1].stop if spans else 0
                length = owned(span.name, span.length, owner, self.world)
                spans.append(Span(span.name, (length,), start))
            rows.append(tuple(spans))
        return tuple(rows)

    @cached_property
    def _pieces(self) -> tuple[tuple[Piece, bool], ...]:
        """All pieces in order, and whether each travels whole."""
        both = [(piece, False) for piece in self.segments.pieces]
        both += [(piece, True) for piece in self.segments.whole]
        return tuple(sorted(both, key=lambda entry: entry[0].start))

    def extent(self, piece: Piece, owner: int) -> tuple[int, int]:
        """Where a piece lies in an owner's shard."""
        return self._before(piece.start, owner), self._before(piece.stop, owner)

    def _before(self, edge: int, owner: int) -> int:
        """How many of an owner's coordinates lie before one of the gradient's."""
        local = self._spans[owner]
        if edge == self.segments.size:
            return local[-1].stop
        number = self.segments.span_at(edge)
        span = self.segments.spans[number]
        return local[number].start + owned(span.name, edge - span.start, owner, self.world)

    def part_room(self, piece: Piece, length: int) -> int:
        """Slots for the entries of a piece that one rank sends to an owner of `length` of it."""
        share = piece.count * length / piece.length
        slots = math.ceil(max(SLACK * share, share + 3 * math.sqrt(share)))
        if self.clustered:
            slots = CARD * (2 + math.ceil(piece.count / (CARD * self.world)))
        return min(slots, length, piece.room)

    def _result_room(self, piece: Piece, length: int, part: int) -> tuple[int, int]:
        """How many entries of a piece an owner of `length` of it sends back, in how many slots."""
        if self.ratio == 1.0:
            count = min(length, self.world * part)
            return count, count
        share = piece.count / piece.length if self.ratio is None else self.ratio
        # a hair above a whole number is that number
        count = min(length, max(1, math.ceil(share * length * (1 - 1e-12))))
        return count, min(length, math.ceil(count * piece.room / piece.count))

    def table(self, device: torch.device) -> ShardTable:
        """The shards as tensors, kept for every later step."""
        if device not in self._tables:
            self._tables[device] = ShardTable.of(self, device)
        return self._tables[device]

    def whole_sent(self, owner: int, device: torch.device) -> Tensor:
        """Which of a rank's whole values are the owner's, counted from the first of them."""
        key = ("sent", owner, device)
        if key not in self._kept:
            places = self._whole_places(self.part(owner), owner)
            runs = torch.tensor(self.segments.whole_runs, dtype=torch.int64).view(-1, 2)
            starts, sizes = runs[:, 0].contiguous(), runs[:, 1] - runs[:, 0]
            run = torch.bucketize(places, starts, right=True) - 1
            number = (sizes.cumsum(0) - sizes)[run] + places - starts[run]
            self._kept[key] = number.to(device)
        return self._kept[key]

    def whole_results(self, owner: int, device: torch.device) -> Tensor:
        """The coordinates of the values that an owner sends back whole."""
        key = ("results", owner, device)
        if key not in self._kept:
            self._kept[key] = self._whole_places(self.result(owner), owner).to(device)
        return self._kept[key]

    def _whole_places(self, shard: Segments, owner: int) -> Tensor:
        """The coordinates of a shard's whole values in the gradient."""
        runs = [torch.arange(start, stop) for start, stop in shard.whole_runs]
        local = torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)
        return reference.collect(local, owner, self)

    @cached_property
    def _tables(self) -> dict[torch.device, ShardTable]:
        return {}

    @cached_property
    def _kept(self) -> dict[object, Tensor]:
        return {}


@dataclass(frozen=True)
class ShardTable:
    """Who owns what and how many slots there are for it, as int64 tensors."""

    starts: Tensor  # of each span in the gradient
    keys: Tensor  # of each span's turns
    local: Tensor  # of each span in every owner's shard: a row for each owner
    pieces: Tensor  # where each piece begins in the gradient
    rooms: Tensor  # slots for each piece in a part: a row for each owner
    slots: Tensor  # where each owner's slots begin, and where the last one's end
    fillers: Tensor  # for each slot, what it holds if nothing else: its owner's "nowhere"

    @staticmethod
    def of(shards: Shards, device: torch.device) -> ShardTable:
        def column(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int64)

        segments, owners = shards.segments, range(shards.world)
        parts = [shards.part(owner) for owner in owners]
        rooms = torch.zeros(shards.world, len(segments.pieces), dtype=torch.int64)
        for owner in owners:
            for number, piece in enumerate(segments.pieces):
                start, stop = shards.extent(piece, owner)
                rooms[owner, number] = shards.part_room(piece, stop - start)
        totals = rooms.sum(dim=1)
        columns = (
            column(span.start for span in segments.spans),
            column(card_key(span.name) for span in segments.spans),
            torch.stack([column(span.start for span in part.spans) for part in parts]),
            column(piece.start for piece in segments.pieces),
            rooms,
            column(shards.slots),
            torch.repeat_interleave(column(part.size for part in parts), totals),
        )
        return ShardTable(*(tensor.to(device) for tensor in columns))
