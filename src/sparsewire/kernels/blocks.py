"""Aligned blocks of the segments, as tensors that are kept from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..segments import Segments, SegmentTable
from ..workspace import Workspace


@dataclass(frozen=True)
class BlockTable:
    """All blocks in the order of the flat gradient, as int64 columns.

    A segment of `count` coordinates to send has so many blocks to choose as hold them.
    """

    starts: Tensor
    stops: Tensor
    segments: Tensor
    slots: Tensor  # the places of those chosen, once each segment's blocks are sorted by rank
    rows: Tensor  # of every segment its start, length, and how many blocks of it are chosen
    is_ragged: bool  # some segment's last block is shorter

    @staticmethod
    def of(segments: Segments, block: int, device: torch.device, work: Workspace) -> BlockTable:
        """The table of a cut gradient, kept for every later step."""
        return work.kept(
            segments,
            ("blocks", block, device),
            lambda: BlockTable._make(segments, block, segments.table(device, work)),
        )

    @staticmethod
    def _make(segments: Segments, block: int, table: SegmentTable) -> BlockTable:
        device = table.starts.device
        blocks = (table.lengths + block - 1) // block
        owner = torch.repeat_interleave(torch.arange(len(segments.sparse), device=device), blocks)
        number = torch.arange(owner.numel(), device=device) - (blocks.cumsum(0) - blocks)[owner]
        starts = table.starts[owner] + number * block
        ends = (table.starts + table.lengths)[owner]
        chosen = (table.counts + block - 1) // block
        return BlockTable(
            starts=starts,
            stops=torch.minimum(starts + block, ends),
            segments=owner,
            slots=(number < chosen[owner]).nonzero().squeeze(1),
            rows=torch.stack([table.starts, table.lengths, chosen], dim=1),
            is_ragged=any(segment.length % block for segment in segments.sparse),
        )
