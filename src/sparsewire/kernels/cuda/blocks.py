"""Norms of blocks of the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from ...segments import Segments
from ...workspace import Workspace
from .. import reference
from ..blocks import BlockTable
from .blocks_kernels import add_squares
from .extract import is_addable
from .launch import run

_HELD = 4096  # coordinates per program
_LONGEST = 1 << 14  # coordinates of the longest block that fits into one program


def block_norms(
    before: Tensor | None, addend: Tensor, segments: Segments, block: int, work: Workspace
) -> Tensor:
    if block > _LONGEST or not is_addable(before, addend, segments):
        return reference.block_norms(before, addend, segments, block, work)
    table = BlockTable.of(segments, block, addend.device, work)
    count, steps = table.starts.numel(), (block - 1).bit_length()
    norms = torch.empty(count, dtype=torch.float32, device=addend.device)
    rows = max(1, _HELD >> steps)
    if count:
        run(
            add_squares,
            (-(-count // rows),),
            addend if before is None else before,
            addend,
            table.starts,
            table.stops,
            norms,
            count,
            HAS_BEFORE=before is not None,
            ROWS=rows,
            WIDTH=1 << steps,
            STEPS=steps,
        )
    return norms
