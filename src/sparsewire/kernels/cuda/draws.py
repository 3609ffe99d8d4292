"""Random coordinates, drawn in time proportional to their number."""

from __future__ import annotations

import torch
from torch import Tensor

from ...randomness import signed
from ...segments import Segments
from ...workspace import Workspace
from .draws_kernels import count_drawn, draw_rest, draw_round, write_drawn, write_runs
from .launch import run
from .plan import BLOCK, plan_of

_ROUNDS = 3  # rounds of parallel draws


def random_k(segments: Segments, key: int, device: torch.device, work: Workspace) -> Tensor:
    if not segments.sparse:
        return torch.empty(0, dtype=torch.int64, device=device)
    plan = plan_of(segments, device, work)
    many, groups = len(plan.segments), len(plan.groups)
    indices = torch.empty(plan.entries, dtype=torch.int64, device=device)
    blank = torch.zeros(_ROUNDS * many + -(-plan.size // 64), dtype=torch.int64, device=device)
    found, bitmap = blank, blank[_ROUNDS * many :].view(torch.int32)
    key = signed(key)
    for number in range(_ROUNDS):
        run(
            draw_round,
            (len(plan.draws),),
            bitmap,
            found,
            plan.segments,
            plan.draws,
            key,
            many,
            ROUND=number,
            BLOCK=BLOCK,
        )
    run(draw_rest, (many,), bitmap, found, plan.segments, key, many, ROUND=_ROUNDS, BLOCK=BLOCK)
    tables = (plan.tiles, plan.groups, plan.segments, plan.group_counts)
    run(count_drawn, (groups,), bitmap, *tables, TILE=plan.tile, GROUP=plan.group)
    run(
        write_drawn,
        (groups,),
        bitmap,
        *tables,
        indices,
        plan.entries,
        TILE=plan.tile,
        GROUP=plan.group,
    )
    return indices


def block_random_k(segments: Segments, key: int, device: torch.device, work: Workspace) -> Tensor:
    if not segments.sparse:
        return torch.empty(0, dtype=torch.int64, device=device)
    plan = plan_of(segments, device, work)
    indices = torch.empty(plan.entries, dtype=torch.int64, device=device)
    run(
        write_runs, (len(plan.draws),), plan.segments, plan.draws, indices, signed(key), BLOCK=BLOCK
    )
    return indices
