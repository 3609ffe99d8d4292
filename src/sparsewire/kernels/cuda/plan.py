"""What the kernels need to know of a cut gradient, as tables on the device, kept between steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...randomness import name_key
from ...segments import Segments
from ...workspace import Workspace
from .columns import FLOOR, MARGIN, MISSES, STEPS

TILE = 4096  # coordinates of one program; its tile never crosses a multiple of this
GROUP = 16  # tiles of one program that only looks at what is listed
STATE = 18  # columns of `Plan.state`
UNKNOWN = 0x7FFFFFFF  # a floor that nothing reaches
BLOCK = 1024  # entries of one program
CHUNK = 1024  # coordinates of a tile that a program looks at together, where it looks at all
LANES = 64  # entries of one tile that a program looks at together
SPARE = 1 << 12  # room in the list even for the smallest segments
BINS = 256  # of a histogram
HELD = 4096  # sampled coordinates that one program can hold


@dataclass(frozen=True)
class Plan:
    """Tables, and buffers that one call leaves clean for the next, on one stream at a time.

    `columns` names the columns of the tables.

    Arguments:
        tiles: runs of coordinates within one parameter and one segment.
        groups: neighbouring tiles of one segment, for programs that only look at what is listed.
        segments: a row for every segment.
        params: the first tile of every parameter, and of the one behind the last.
        draws: segment and first number of every block of entries.
        dense: the numbers of the tiles that are sent densely.
        state: what is known of every segment's k-th magnitude; see rank.py.
        histograms: one for every segment.
    """

    device: torch.device
    tile: int
    group: int
    size: int
    capacity: int
    entries: int
    dense_size: int
    tiles: Tensor
    groups: Tensor
    segments: Tensor
    params: Tensor
    draws: Tensor
    dense: Tensor
    state: Tensor
    histograms: Tensor
    list_capacity: int
    listed: Tensor  # what reaches its floor: values (of both deposits), then places in the tile
    parts: Tensor  # of every tile: first in the list, length
    cursor: Tensor  # where the list of each deposit ends
    tile_counts: Tensor  # over the cut, equal to it
    group_counts: Tensor
    squares: Tensor
    non_finite: Tensor
    second_cursor: Tensor
    samples: dict[int, Sample] = field(default_factory=dict)

    @property
    def param_count(self) -> int:
        return len(self.params) - 1

    @property
    def tally(self) -> Tensor:
        """Of every segment: guesses that missed, and steps."""
        return self.state[:, MISSES.value : STEPS.value + 1]


@dataclass(frozen=True)
class Sample:
    """Tables of a sample, and buffers that one call leaves clean for the next.

    Arguments:
        rows: stride of every segment, how many to keep of the shorter and the longer sample, and
            how long that is.
        small: the segments whose sample one program can hold.
        blocks: of all others: segment, first number in its sample, blocks of it.
        seen: the magnitudes of those, block by block.
    """

    rows: Tensor
    small: Tensor
    blocks: Tensor
    seen: Tensor


def plan_of(segments: Segments, device: torch.device, work: Workspace) -> Plan:
    """The plan of a cut gradient, made once."""
    index: int | None = device.index  # torch says it is always there
    if device.type == "cuda" and index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return work.kept(segments, ("cuda", device), lambda: _plan(segments, device))


def sample_of(segments: Segments, plan: Plan, sample: int) -> Sample:
    """The tables of a sample, made once."""
    if sample not in plan.samples:
        rows, small, blocks = [], [], []
        for number, stride in enumerate(segments.strides(sample)):
            segment = segments.sparse[number]
            seen = -(-segment.length // stride)
            keeps = [max(1, round(s * segment.count / segment.length)) for s in (seen - 1, seen)]
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
    many = len(segments.sparse)
    groups: list[tuple[int, ...]] = []
    rows: list[tuple[int, ...]] = []
    draws: list[tuple[int, ...]] = []
    slot = 0
    for number, segment in enumerate(segments.sparse):
        first, last = np.searchsorted(
            edges, (segment.start, segment.start + segment.length)
        ).tolist()
        begin = len(groups)
        for tile in range(first, last, GROUP):
            groups.append((tile, min(GROUP, last - tile), number, begin))
        wanted = min(segment.count, segment.length - segment.count)
        sizes = (segment.start, segment.length, segment.count, segment.capacity)
        rows.append((*sizes, slot, len(groups) - begin, name_key(segment.name), wanted))
        draws += [(number, at) for at in range(0, segment.count, BLOCK)]
        slot += segment.count
    params = np.searchsorted(edges, [*(param.start for param in segments.params), segments.size])
    state = np.zeros((many, STATE), dtype=np.int64)
    state[:, FLOOR.value] = UNKNOWN
    state[:, MARGIN.value] = 3932
    list_capacity = (
        min(segments.size, 2 * segments.capacity + segments.size // 64 + SPARE) if many else 0
    )

    cursor = torch.tensor([0, list_capacity], dtype=torch.int32, device=device)

    def upload(table: Any, width: int) -> Tensor:
        return torch.from_numpy(np.asarray(table, dtype=np.int64).reshape(-1, width)).to(device)

    def blank(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Plan(
        device=device,
        tile=TILE,
        group=GROUP,
        size=segments.size,
        capacity=segments.capacity,
        entries=slot,
        dense_size=segments.dense_size,
        tiles=upload(tiles, 4),
        groups=upload(groups, 4),
        segments=upload(rows, 8),
        params=upload(params, 1),
        draws=upload(draws, 2),
        dense=upload(np.flatnonzero(tiles[:, 2] < 0), 1),
        state=upload(state, STATE),
        histograms=blank(many, BINS, dtype=torch.int32),
        list_capacity=list_capacity,
        listed=blank(4 * list_capacity, dtype=torch.int32),
        parts=blank(len(tiles), 2, dtype=torch.int32),
        cursor=cursor,
        second_cursor=cursor[1:],
        tile_counts=blank(len(tiles), 2),
        group_counts=blank(2, len(groups)),
        squares=blank(len(tiles), dtype=torch.float32),
        non_finite=blank(len(tiles), dtype=torch.int32),
    )


def _tiles(segments: Segments) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows of `Plan.tiles`, which begin with parameters, segments and multiples of TILE."""
    marks = {segment.start: (number, 0) for number, segment in enumerate(segments.sparse)}
    place = 0
    for segment in segments.dense:
        marks[segment.start] = (-1, place - segment.start)
        place += segment.length
    edges = sorted({*marks, *(param.start for param in segments.params if param.length)})
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
