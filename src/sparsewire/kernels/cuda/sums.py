"""Adding up messages, and putting back what rounding changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import reference
from .add import add_messages, find_bounds, put_entries
from .launch import run
from .plan import BLOCK, CHUNK, LANES, plan_of

if TYPE_CHECKING:
    from ...segments import Segments

_MESSAGES = 32  # added up in one launch


def add_up(
    flat: Tensor, messages: Sequence[tuple[Tensor, Tensor]], share: float, segments: Segments
) -> None:
    if flat.dtype != torch.float32 or any(v.dtype != torch.float32 for _, v in messages):
        return reference.add_up(flat, messages, share, segments)
    if not messages or not segments.size:
        flat.zero_()
        return None
    plan = plan_of(segments, flat.device)
    tiles = len(plan.tiles)
    for at in range(0, len(messages), _MESSAGES):
        some = messages[at : at + _MESSAGES]
        indices = tuple(i.contiguous() for i, _ in some)
        values = tuple(v.contiguous() for _, v in some)
        counts = tuple(i.numel() for i in indices)
        many = len(some)
        bounds = plan.tiles.new_empty((tiles + 1) * many)
        run(
            find_bounds,
            (tiles // 128 + 1, many),
            bounds,
            indices,
            counts,
            plan.tiles,
            tiles,
            plan.size,
            -(-max(counts).bit_length() // 3),
            MESSAGES=many,
            BLOCK=128,
        )
        run(
            add_messages,
            (tiles,),
            flat,
            indices,
            values,
            counts,
            share,
            bounds,
            plan.tiles,
            MESSAGES=many,
            ADDS=at > 0,
            TILE=plan.tile,
            LANES=LANES,
            CHUNK=min(CHUNK, plan.tile),
            enable_fp_fusion=False,  # products are rounded before they are added
        )
    return None


def put_back(ledger: Tensor, indices: Tensor, errors: Tensor, segments: Segments) -> None:
    if ledger.dtype != torch.float32 or errors.dtype != torch.float32:
        return reference.put_back(ledger, indices, errors, segments)
    if not errors.numel():
        return None
    plan = plan_of(segments, ledger.device)
    count = indices.numel()
    blocks = -(-count // BLOCK)
    run(
        put_entries,
        (blocks + len(plan.wholes),),
        ledger,
        indices.contiguous(),
        errors.contiguous(),
        count,
        plan.size,
        blocks,
        plan.tiles,
        plan.wholes,
        TILE=plan.tile,
        BLOCK=BLOCK,
    )
    return None
