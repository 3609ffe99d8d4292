"""Summation of messages, one tile of the result at a time, so each tile is written once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...segments import Segments
from ...workspace import Workspace
from .. import reference
from .jit import Array, array, is_flat, jit, parts_for, share_out
from .stripes import (
    STRIPE,
    address,
    copy_stripe_past_cache,
    finish_writing,
    float32_at,
    int64_at,
)

COUNT, INDICES, VALUES = range(3)  # columns of the table of messages; the last two are addresses
START, STOP, PLACE = range(3)  # columns of the table of dense runs
_BLOCK = 4096  # coordinates of the result per tile; fits in the cache
_LARGE = 1 << 21  # coordinates; larger results do not stay in the cache until they are used


def add_up(
    flat: Tensor,
    messages: Sequence[tuple[Tensor, Tensor]],
    share: float,
    segments: Segments,
    work: Workspace,
) -> None:
    if not is_flat(flat, torch.float32) or not all(
        is_flat(indices, torch.int64)
        and is_flat(values, torch.float32)
        and values.numel() >= indices.numel() + segments.dense_size
        for indices, values in messages
    ):
        reference.add_up(flat, messages, share, segments, work)
        return
    table = np.array(
        [(i.numel(), i.data_ptr(), v.data_ptr()) for i, v in messages], np.int64
    ).reshape(-1, 3)
    runs = _runs(segments, work)
    size, parts = flat.numel(), parts_for(flat.numel())
    target, factor = array(flat), np.float32(share)

    def add_part(part: int) -> None:
        begin, end = size * part // parts, size * (part + 1) // parts
        _add_up(target, begin, end, table, factor, runs, size >= _LARGE)

    share_out(parts, add_part)


def put_back(
    residual: Tensor, indices: Tensor, errors: Tensor, segments: Segments, work: Workspace
) -> None:
    if not (
        is_flat(residual, torch.float32)
        and is_flat(indices, torch.int64)
        and is_flat(errors, torch.float32)
        and errors.numel() >= indices.numel() + segments.dense_size
        and residual.numel() >= segments.size
    ):
        reference.put_back(residual, indices, errors, segments, work)
        return
    target = array(residual[: segments.size])
    _put_back(target, array(indices), array(errors), _runs(segments, work))


def _runs(segments: Segments, work: Workspace) -> Array:
    """Return the dense runs as rows of (start, stop, position of the first value)."""

    def make() -> Array:
        rows, at = [], 0
        for start, stop in segments.dense_runs:
            rows.append((start, stop, at))
            at += stop - start
        return np.array(rows, np.int64).reshape(-1, 3)

    return work.kept(segments, "runs", make)


@jit
def _add_up(
    flat: Array,
    begin: int,
    end: int,
    messages: Array,
    share: np.float32,
    runs: Array,
    past_cache: bool,
) -> None:
    """Sum all messages over [begin, end). Rows of `messages` are a count and two addresses.

    Reads every message once and writes the result once. Each block is summed in the cache; a large
    result is written with non-temporal stores.
    """
    cursors = np.empty(len(messages), np.int64)
    for rank in range(len(messages)):
        count = messages[rank, COUNT]
        indices = int64_at(messages[rank, INDICES], count)
        cursors[rank] = np.searchsorted(indices, begin)
    capacity = np.empty(_BLOCK, np.float32)
    run = 0
    for start in range(begin, end, _BLOCK):
        stop = min(start + _BLOCK, end)
        block = capacity[: stop - start] if past_cache else flat[start:stop]
        block[:] = 0
        while run < len(runs) and runs[run, STOP] <= start:
            run += 1
        for rank in range(len(messages)):
            count = messages[rank, COUNT]
            indices = int64_at(messages[rank, INDICES], count)
            values = float32_at(messages[rank, VALUES], count)
            at = cursors[rank]
            while at < count and indices[at] < stop:
                place = indices[at] - start
                if place >= 0:
                    block[place] += values[at] * share
                at += 1
            cursors[rank] = at
            later = run
            while later < len(runs) and runs[later, START] < stop:
                low, high = max(start, runs[later, START]), min(stop, runs[later, STOP])
                first = count + runs[later, PLACE] + low - runs[later, START]
                dense = float32_at(messages[rank, VALUES] + 4 * first, high - low)
                goal = block[low - start : high - start]
                for n in range(high - low):
                    goal[n] += dense[n] * share
                later += 1
        if past_cache:
            _copy_past_cache(block, flat[start:stop])
    if past_cache:
        finish_writing()


@jit
def _copy_past_cache(block: Array, goal: Array) -> None:
    source, end = address(block), address(goal)
    head = min(len(goal), ((-end) & 63) >> 2)
    goal[:head] = block[:head]
    stripes = (len(goal) - head) // STRIPE
    for n in range(stripes):
        first = 4 * (head + n * STRIPE)
        copy_stripe_past_cache(source + first, end + first)
    tail = head + stripes * STRIPE
    goal[tail:] = block[tail:]


@jit
def _put_back(residual: Array, indices: Array, errors: Array, runs: Array) -> None:
    size = len(residual)
    count = len(indices)
    for n in range(count):
        place = indices[n]
        if 0 <= place < size:
            residual[place] += errors[n]
    for run in range(len(runs)):
        start, stop, at = runs[run]
        goal, dense = residual[start:stop], errors[count + at : count + at + stop - start]
        for n in range(stop - start):
            goal[n] += dense[n]
