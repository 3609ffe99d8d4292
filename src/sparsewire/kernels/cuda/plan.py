"""What the kernels need to know of a cut gradient, as tables on the device, kept between steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...segments import Segments

TILE = 4096  # coordinates of one program; its tile never crosses a multiple of this
GROUP = 16  # tiles of one program that only looks at what is listed
STATE = 18  # columns of `Plan.state`; see rank.py
UNKNOWN = 0x7FFFFFFF  # a floor that nothing reaches
BLOCK = 1024  # entries of one program
CHUNK = 1024  # coordinates of a tile that a program looks at together, where it looks at all
LANES = 64  # entries of one tile that a program looks at together
SPARE = 1 << 12  # room in the list even for the smallest pieces
BINS = 256  # of a histogram
HELD = 4096  # sampled coordinates that one program can hold


@dataclass(frozen=True)
class Plan:
    """Tables, and buffers that one call leaves clean for the next, on one stream at a time.

    Arguments:
        tiles: start, stop, piece (-1: travels whole), place of a whole tile among the whole values.
        groups: first tile, tiles, piece, first group of the piece.
        pieces: start, length, count, room, entries before it, groups, key, draws wanted.
        spans: the first tile of every span, and of the one behind the last.
        draws: piece and first number of every block of entries.
        wholes: the numbers of the tiles that travel whole.
        state: what is known of every piece's k-th magnitude; see rank.py.
        histograms: one for every piece.
    """

    device: torch.device
    tile: int
    group: int
    size: int
    room: int
    entries: int
    whole_size: int
    tiles: Tensor
    groups: Tensor
    pieces: Tensor
    spans: Tensor
    draws: Tensor
    wholes: Tensor
    state: Tensor
    histograms: Tensor
    capacity: int
    listed: Tensor  # what reaches its floor: values (of both deposits), then places in the tile
    parts: Tensor  # of every tile: first in the list, length
    cursor: Tensor  # where the list of each deposit ends
    tile_counts: Tensor  # over the cut, equal to it
    group_counts: Tensor
    squares: Tensor
    unsound: Tensor
    second_cursor: Tensor
    samples: dict[int, Sample] = field(default_factory=dict)

    @property
    def span_count(self) -> int:
        return len(self.spans) - 1


@dataclass(frozen=True)
class Sample:
    """Tables of a sample, and buffers that one call leaves clean for the next.

    Arguments:
        rows: stride of every piece, how many to keep of the shorter and the longer sample, and how
            long that is.
        small: the pieces whose sample one program can hold.
        blocks: of all others: piece, first number in its sample, blocks of it.
        seen: the magnitudes of those, block by block.
    """

    rows: Tensor
    small: Tensor
    blocks: Tensor
    seen: Tensor


def plan_of(segments: Segments, device: torch.device) -> Plan:
    """The plan of a cut gradient, made once."""
    index: int | None = device.index  # torch says it is always there
    if device.type == "cuda" and index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = ("cuda", device)
    if key not in segments.scratch:
        plan = segments.scratch[key] = _plan(segments, device)
        segments.scratch["predictor"] = plan.state[:, 15:17]  # misses, steps
    found: Plan = segments.scratch[key]
    return found


def sample_of(segments: Segments, plan: Plan, sample: int) -> Sample:
    """The tables of a sample, made once."""
    if sample not in plan.samples:
        rows, small, blocks = [], [], []
        for number, stride in enumerate(segments.strides(sample)):
            piece = segments.pieces[number]
            seen = -(-piece.length // stride)
            keeps = [max(1, round(s * piece.count / piece.length)) for s in (seen - 1, seen)]
            rows.append((stride, *keeps, seen))
            if seen <= HELD:
                small.append(number)
                continue
            many = -(-seen // BLOCK)
            blocks += [(number, BLOCK * block, many) for block in range(many)]
        plan.samples[sample] = Sample(
            rows=torch.tensor(rows, dtype=torch.int64).view(-1, 4).to(plan.device),
            small=torch.tensor(small, dtype=torch.int64).to(plan.device),
            blocks=torch.tensor(blocks, dtype=torch.int64).view(-1, 3).to(plan.device),
            seen=torch.empty(len(blocks) * BLOCK, dtype=torch.int32, device=plan.device),
        )
    return plan.samples[sample]


def _plan(segments: Segments, device: torch.device) -> Plan:
    tiles = _tiles(segments)
    edges = tiles[:, 0]
    many = len(segments.pieces)
    keys = segments.table(torch.device("cpu")).keys.tolist()
    groups: list[tuple[int, ...]] = []
    pieces: list[tuple[int, ...]] = []
    draws: list[tuple[int, ...]] = []
    slot = 0
    for number, piece in enumerate(segments.pieces):
        first, last = np.searchsorted(edges, (piece.start, piece.start + piece.length)).tolist()
        begin = len(groups)
        for tile in range(first, last, GROUP):
            groups.append((tile, min(GROUP, last - tile), number, begin))
        wanted = min(piece.count, piece.length - piece.count)
        sizes = (piece.start, piece.length, piece.count, piece.room)
        pieces.append((*sizes, slot, len(groups) - begin, keys[number], wanted))
        draws += [(number, at) for at in range(0, piece.count, BLOCK)]
        slot += piece.count
    spans = np.searchsorted(edges, [*(span.start for span in segments.spans), segments.size])
    state = np.zeros((many, STATE), dtype=np.int64)
    state[:, 0] = UNKNOWN  # deposit.FLOOR
    state[:, 14] = 3932  # rank.MARGIN
    capacity = min(segments.size, 2 * segments.room + segments.size // 64 + SPARE) if many else 0

    cursor = torch.tensor([0, capacity], dtype=torch.int32, device=device)

    def upload(table: Any, width: int) -> Tensor:
        return torch.from_numpy(np.asarray(table, dtype=np.int64).reshape(-1, width)).to(device)

    def blank(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Plan(
        device=device,
        tile=TILE,
        group=GROUP,
        size=segments.size,
        room=segments.room,
        entries=slot,
        whole_size=segments.whole_size,
        tiles=upload(tiles, 4),
        groups=upload(groups, 4),
        pieces=upload(pieces, 8),
        spans=upload(spans, 1),
        draws=upload(draws, 2),
        wholes=upload(np.flatnonzero(tiles[:, 2] < 0), 1),
        state=upload(state, STATE),
        histograms=blank(many, BINS, dtype=torch.int32),
        capacity=capacity,
        listed=blank(4 * capacity, dtype=torch.int32),
        parts=blank(len(tiles), 2, dtype=torch.int32),
        cursor=cursor,
        second_cursor=cursor[1:],
        tile_counts=blank(len(tiles), 2),
        group_counts=blank(2, len(groups)),
        squares=blank(len(tiles), dtype=torch.float32),
        unsound=blank(len(tiles), dtype=torch.int32),
    )


def _tiles(segments: Segments) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows of `Plan.tiles`: cut where a span or piece begins, and at all multiples of TILE."""
    marks = {piece.start: (number, 0) for number, piece in enumerate(segments.pieces)}
    place = 0
    for piece in segments.whole:
        marks[piece.start] = (-1, place - piece.start)
        place += piece.length
    edges = sorted({*marks, *(span.start for span in segments.spans if span.length)})
    owners, owner = [], (-1, 0)
    for edge in edges:
        owner = marks.get(edge, owner)
        owners.append(owner)
    starts = np.union1d(edges, np.arange(0, segments.size, TILE)).astype(np.int64)
    stops = np.append(starts[1:], segments.size)
    rows = np.asarray(owners, dtype=np.int64).reshape(-1, 2)
    if not len(starts):
        return np.zeros((0, 4), dtype=np.int64)
    rows = rows[np.searchsorted(edges, starts, side="right") - 1]
    places = np.where(rows[:, 0] < 0, starts + rows[:, 1], -1)
    return np.stack([starts, stops, rows[:, 0], places], axis=1)
