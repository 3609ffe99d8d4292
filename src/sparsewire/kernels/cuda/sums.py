"""The sum of messages, and the return of rounding errors to the residual."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...segments import Segments
from ...workspace import Workspace
from .. import reference
from .launch import run
from .plan import BLOCK, CHUNK, LANES, plan_of
from .sums_kernels import COLUMNS, add_messages, find_bounds, put_entries

_MESSAGES = 32  # messages searched in one launch
_SEARCHES = 128  # searches per program
_BATCH = 4  # messages fetched together


def add_up(
    flat: Tensor,
    messages: Sequence[tuple[Tensor, Tensor]],
    share: float,
    segments: Segments,
    work: Workspace,
) -> None:
    if flat.dtype != torch.float32 or any(v.dtype != torch.float32 for _, v in messages):
        return reference.add_up(flat, messages, share, segments, work)
    if not messages or not segments.size:
        flat.zero_()
        return None
    plan = plan_of(segments, flat.device, work)
    tiles, many = len(plan.tiles), len(messages)
    bounds = plan.tiles.new_empty((tiles + 1) * many, dtype=torch.int32)
    table = plan.tiles.new_empty(many * COLUMNS.value)
    kept = [(indices.contiguous(), values.contiguous()) for indices, values in messages]
    for at in range(0, many, _MESSAGES):
        some = kept[at : at + _MESSAGES]
        counts = tuple(indices.numel() for indices, _ in some)
        run(
            find_bounds,
            (tiles // _SEARCHES + 1, len(some)),
            bounds,
            table,
            tuple(indices for indices, _ in some),
            tuple(values for _, values in some),
            counts,
            plan.tiles,
            tiles,
            plan.size,
            max(counts).bit_length(),
            at,
            many,
            MESSAGES=len(some),
            BLOCK=_SEARCHES,
        )
    run(
        add_messages,
        (tiles,),
        flat,
        bounds,
        table,
        many,
        share,
        plan.tiles,
        TILE=plan.tile,
        CHUNK=min(CHUNK, plan.tile),
        LANES=LANES,
        BATCH=_BATCH,
        num_warps=2,  # as many threads as LANES: see cells.py
    )
    return None


def put_back(
    residual: Tensor, indices: Tensor, errors: Tensor, segments: Segments, work: Workspace
) -> None:
    if residual.dtype != torch.float32 or errors.dtype != torch.float32:
        return reference.put_back(residual, indices, errors, segments, work)
    if not errors.numel():
        return None
    plan = plan_of(segments, residual.device, work)
    count = indices.numel()
    blocks = -(-count // BLOCK)
    run(
        put_entries,
        (blocks + len(plan.dense),),
        residual,
        indices.contiguous(),
        errors.contiguous(),
        count,
        plan.size,
        blocks,
        plan.tiles,
        plan.dense,
        TILE=plan.tile,
        BLOCK=BLOCK,
    )
    return None
