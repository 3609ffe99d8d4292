"""Withdrawals: which launches, in which order, on which tables."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...randomness import mix_int, signed
from ...segments import Segments
from ...workspace import Workspace
from .. import Selection, reference
from .accumulate import accumulate, gather
from .launch import Arguments, again, run
from .plan import BLOCK, CHUNK, HELD, LANES, STATE, Plan, Sample, plan_of, sample_of
from .rank import count_over, deposit_again, extract, rank
from .sample import bisect_sample, rank_sample

_ADDENDS = (torch.float32, torch.bfloat16, torch.float16)
_BY_LIST = (8, 8, 7)  # bits of what a magnitude has over the floor, digit by digit
_BY_ALL = (8, 8, 8, 7)  # and of a whole magnitude
_WARPS = 8
_FEW_WARPS = 4  # of programs that mostly wait
_WITHDRAWING = {"num_warps": 8, "maxnreg": 64}  # enough where all is listed
_BISECTING = {"num_warps": 8, "maxnreg": 40}  # for all segments of a transformer at once
_LISTING = {"num_warps": 4, "maxnreg": 128}  # enough for whole tiles; the others may spill


def top_k(
    before: Tensor | None, addend: Tensor, after: Tensor, segments: Segments, work: Workspace
) -> Selection:
    if not _is_ours(before, addend, after, segments):
        return reference.top_k(before, addend, after, segments, work)
    plan = plan_of(segments, after.device, work)
    return _ranked(before, addend, after, plan, plan.entries, is_sampled=False)


def over_threshold(
    before: Tensor | None,
    addend: Tensor,
    after: Tensor,
    segments: Segments,
    sample: int,
    key: int,
    work: Workspace,
) -> Selection:
    if not _is_ours(before, addend, after, segments):
        return reference.over_threshold(before, addend, after, segments, sample, key, work)
    plan = plan_of(segments, after.device, work)
    if segments.sparse:
        _find_thresholds(before, addend, after, plan, sample_of(segments, plan, sample), key)
    return _ranked(before, addend, after, plan, plan.capacity, is_sampled=True)


def _find_thresholds(
    before: Tensor | None, addend: Tensor, after: Tensor, plan: Plan, sample: Sample, key: int
) -> None:
    """They become the floors of the segments."""
    held = after if before is None else before
    word = signed(mix_int(key))
    sizes = {"HAS_BEFORE": before is not None, "STATE": STATE}
    if len(sample.small):
        run(
            bisect_sample,
            (len(sample.small),),
            held,
            addend,
            plan.segments,
            sample.rows,
            sample.small,
            word,
            plan.state,
            **sizes,
            SEEN=HELD,
            **_BISECTING,
        )
    if not len(sample.blocks):
        return
    given = Arguments(
        held,
        addend,
        plan.segments,
        sample.rows,
        sample.blocks,
        word,
        plan.state,
        plan.histograms,
        sample.seen,
    )
    for digit, bits in enumerate(_BY_ALL):
        again(
            rank_sample,
            (len(sample.blocks),),
            given,
            **sizes,
            SHIFT=sum(_BY_ALL[digit + 1 :]),
            BITS=bits,
            BLOCK=BLOCK,
        )


def chosen(
    before: Tensor | None,
    addend: Tensor,
    after: Tensor,
    segments: Segments,
    indices: Tensor,
    work: Workspace,
) -> Selection:
    if not _is_ours(before, addend, after, segments):
        return reference.chosen(before, addend, after, segments, indices, work)
    plan = plan_of(segments, after.device, work)
    return _taken_at(before, addend, after, plan, indices.contiguous())


def is_addable(before: Tensor | None, addend: Tensor, segments: Segments) -> bool:
    """Whether the kernels can add these up."""
    return (
        0 < segments.size < 1 << 32  # what a list of 32-bit places can tell apart
        and (before is None or before.dtype == torch.float32)
        and addend.dtype in _ADDENDS
        and addend.is_contiguous()
    )


def _is_ours(before: Tensor | None, addend: Tensor, after: Tensor, segments: Segments) -> bool:
    return after.dtype == torch.float32 and is_addable(before, addend, segments)


def _deposited(
    before: Tensor | None, addend: Tensor, after: Tensor, plan: Plan, entries: int, lists: bool
) -> Selection:
    """What is known after the first pass: room for the entries, and the dense segments' values."""
    new = after.new_empty
    selection = Selection(
        new(entries, dtype=torch.int64),
        new(entries + plan.dense_size),
        new(plan.param_count, dtype=torch.float64),
        new((), dtype=torch.int64),
        entries,
    )
    run(
        accumulate,
        (len(plan.tiles),),
        after if before is None else before,
        addend,
        after,
        selection.values,
        plan.tiles,
        plan.state,
        plan.listed,
        plan.parts,
        plan.cursor,
        plan.squares,
        plan.non_finite,
        entries,
        plan.list_capacity,
        plan.list_capacity,
        HAS_BEFORE=before is not None,
        LISTS=lists,
        TILE=plan.tile,
        STATE=STATE,
        **(_LISTING if lists else {"num_warps": _WARPS}),
    )
    return selection


def _taken_at(
    before: Tensor | None, addend: Tensor, after: Tensor, plan: Plan, indices: Tensor
) -> Selection:
    count = indices.numel()
    selection = _deposited(before, addend, after, plan, count, lists=False)
    blocks = -(-count // BLOCK)
    run(
        gather,
        (blocks + plan.param_count + 1,),
        after,
        indices,
        selection.values,
        count,
        plan.size,
        blocks,
        plan.params,
        plan.squares,
        plan.non_finite,
        selection.squares,
        selection.non_finite,
        plan.param_count,
        BLOCK=BLOCK,
    )
    return replace(selection, indices=indices)


def _ranked(
    before: Tensor | None,
    addend: Tensor,
    after: Tensor,
    plan: Plan,
    entries: int,
    is_sampled: bool,
) -> Selection:
    """Withdraw by rank; see rank.py."""
    groups, segments = len(plan.groups), len(plan.segments)
    if not segments:
        nothing = torch.empty(0, dtype=torch.int64, device=after.device)
        return _taken_at(before, addend, after, plan, nothing)
    selection = _deposited(before, addend, after, plan, entries, lists=True)
    held = after if before is None else before
    sizes = {
        "TILE": plan.tile,
        "GROUP": plan.group,
        "LANES": LANES,
        "CHUNK": min(CHUNK, plan.tile),
        "STATE": STATE,
    }

    given = Arguments(
        held,
        addend,
        after,
        plan.listed,
        plan.list_capacity,
        plan.parts,
        plan.tiles,
        plan.groups,
        plan.segments,
        plan.state,
        plan.histograms,
        plan.tile_counts,
        plan.group_counts,
        groups,
        plan.params,
        plan.squares,
        plan.non_finite,
        selection.squares,
        selection.non_finite,
        plan.param_count,
    )

    def rank_digits(attempt: int, by_list: int, by_all: int) -> None:
        """One round; digits are numbered from the top, and there may be none."""
        is_inspecting = attempt == 0 and by_list == 0
        again(
            rank,
            (groups + (plan.param_count + 1 if is_inspecting else 0),),
            given,
            HAS_BEFORE=before is not None,
            SAMPLED=is_sampled,
            TRY=attempt,
            FIRST=by_list == 0,
            SHIFT=sum(_BY_LIST[by_list + 1 :]) if by_list < 3 else 0,
            BITS=_BY_LIST[by_list] if by_list < 3 else 0,
            ALL_FIRST=by_all == 0,
            ALL_SHIFT=sum(_BY_ALL[by_all + 1 :]) if by_all >= 0 else 0,
            ALL_BITS=_BY_ALL[by_all] if by_all >= 0 else 0,
            **sizes,
            num_warps=_WARPS if is_inspecting else _FEW_WARPS,
        )

    for digit in range(3):
        rank_digits(0, digit, -1)
    run(
        deposit_again,
        (groups,),
        held,
        addend,
        after,
        plan.tiles,
        plan.groups,
        plan.state,
        plan.listed,
        plan.parts,
        plan.second_cursor,
        plan.squares,
        plan.non_finite,
        plan.list_capacity,
        HAS_BEFORE=before is not None,
        TILE=plan.tile,
        STATE=STATE,
        num_warps=_FEW_WARPS,
    )
    for digit in range(5):
        rank_digits(1, digit, digit - 1)
    run(
        count_over,
        (groups,),
        after,
        plan.listed,
        plan.list_capacity,
        plan.parts,
        plan.tiles,
        plan.groups,
        plan.state,
        plan.tile_counts,
        plan.group_counts,
        groups,
        **sizes,
        num_warps=_FEW_WARPS,
    )
    count = after.new_empty((), dtype=torch.int64)
    run(
        extract,
        (groups,),
        after,
        plan.listed,
        plan.list_capacity,
        plan.parts,
        plan.cursor,
        plan.tiles,
        plan.groups,
        plan.segments,
        plan.state,
        plan.tile_counts,
        plan.group_counts,
        selection.indices,
        selection.values,
        count,
        plan.size,
        entries,
        groups,
        segments,
        SAMPLED=is_sampled,
        **sizes,
        **_WITHDRAWING,
    )
    return replace(selection, count=count) if is_sampled else selection
