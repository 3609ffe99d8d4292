"""Tables on the device that describe a partitioned gradient, kept between steps."""

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

TILE = 4096  # coordinates per program; no tile crosses a multiple of this
GROUP = 16  # tiles per program in passes over the list
STATE = 18  # columns of `Plan.state`
UNKNOWN = 0x7FFFFFFF  # a floor above all magnitudes
BLOCK = 1024  # entries per program
CHUNK = 1024  # coordinates processed together in passes over whole tiles
LANES = 64  # entries of one tile processed together in passes over the list
SPARE = 1 << 12  # extra entries of the list, for small segments
BINS = 256  # bins of a histogram
HELD = 4096  # the largest sample, in coordinates, that fits into one program


@dataclass(frozen=True)
class Plan:
    """Tables, and buffers that every call resets for the next one. Use it on one stream at a time.

    `columns` names the columns of the tables.

    Arguments:
        tiles: Runs of coordinates within one parameter and one segment.
        groups: Neighbouring tiles of one segment, for passes over the list.
        segments: A row for every segment.
        params: The first tile of every parameter, then the number of tiles.
        draws: The segment and first entry of every block of entries.
        dense: The numbers of the tiles that are sent densely.
        state: The state of the search for every segment's k-th magnitude; see rank.py.
        histograms: A histogram for every segment.
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
    listed: Tensor  # entries that reach their floor: values of both passes, then positions in tiles
    parts: Tensor  # each tile's part of the list: first entry, length
    cursor: Tensor  # the end of the list of each accumulation pass
    tile_counts: Tensor  # numbers of magnitudes over the cut, and equal to it
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
        """The numbers of missed guesses and of steps, for every segment."""
        return self.state[:, MISSES.value : STEPS.value + 1]


@dataclass(frozen=True)
class Sample:
    """Tables of a sample, and buffers that every call resets for the next one.

    Arguments:
        rows: Each segment's stride, the number of coordinates to keep of the shorter and of the
            longer sample, and the length of the longer one.
        small: The segments whose sample fits into one program.
        blocks: For the other samples: segment, first number, and number of blocks of the sample.
        seen: The magnitudes in these samples, block by block.
    """

    rows: Tensor
    small: Tensor
    blocks: Tensor
    seen: Tensor


def plan_of(segments: Segments, device: torch.device, work: Workspace) -> Plan:
    """Return the plan of a partitioned gradient, which is made once."""
    index: int | None = device.index  # torch's annotation lacks None
    if device.type == "cuda" and index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return work.kept(segments, ("cuda", device), lambda: _plan(segments, device))


def sample_of(segments: Segments, plan: Plan, sample: int) -> Sample:
    """Return the tables of a sample, which are made once."""
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
    """Return `Plan.tiles`. A tile begins at each parameter, segment and multiple of TILE.

    Coordinates outside all segments (see `Shards.selected`) are never dense, because messages hold
    no values for them.
    """
    marks = {segment.stop: (0, 0) for segment in segments.dense}
    marks |= {segment.start: (number, 0) for number, segment in enumerate(segments.sparse)}
    place = 0
    for segment in segments.dense:
        marks[segment.start] = (-1, place - segment.start)
        place += segment.length
    marks.pop(segments.size, None)
    edges = sorted({*marks, *(param.start for param in segments.params if param.length)})
    owners, owner = [], (0, 0)
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
