"""Withdrawals: which launches, in which order, on which tables."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class _Ranking:
    """The launches after a deposit that find the rank of each segment and withdraw by it."""

    held: Tensor  # `before`; any tensor if there is none
    addend: Tensor
    after: Tensor
    plan: Plan
    selection: Selection
    has_before: bool
    is_sampled: bool

    def arguments(self) -> Arguments:
        """Those of `rank`, which is launched eight times."""
        plan = self.plan
        return Arguments(
            self.held,
            self.addend,
            self.after,
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
            len(plan.groups),
            plan.params,
            plan.squares,
            plan.non_finite,
            self.selection.squares,
            self.selection.non_finite,
            plan.param_count,
        )

    def rank_digits(self, given: Arguments, attempt: int, by_list: int, by_all: int) -> None:
        """One round; digits are numbered from the top, and there may be none."""
        is_inspecting = attempt == 0 and by_list == 0
        inspecting = self.plan.param_count + 1 if is_inspecting else 0
        again(
            rank,
            (len(self.plan.groups) + inspecting,),
            given,
            HAS_BEFORE=self.has_before,
            SAMPLED=self.is_sampled,
            TRY=attempt,
            FIRST=by_list == 0,
            SHIFT=sum(_BY_LIST[by_list + 1 :]) if by_list < 3 else 0,
            BITS=_BY_LIST[by_list] if by_list < 3 else 0,
            ALL_FIRST=by_all == 0,
            ALL_SHIFT=sum(_BY_ALL[by_all + 1 :]) if by_all >= 0 else 0,
            ALL_BITS=_BY_ALL[by_all] if by_all >= 0 else 0,
            **_sizes(self.plan),
            num_warps=_WARPS if is_inspecting else _FEW_WARPS,
        )

    def deposit_again(self) -> None:
        plan = self.plan
        run(
            deposit_again,
            (len(plan.groups),),
            self.held,
            self.addend,
            self.after,
            plan.tiles,
            plan.groups,
            plan.state,
            plan.listed,
            plan.parts,
            plan.second_cursor,
            plan.squares,
            plan.non_finite,
            plan.list_capacity,
            HAS_BEFORE=self.has_before,
            TILE=plan.tile,
            STATE=STATE,
            num_warps=_FEW_WARPS,
        )

    def count_over(self) -> None:
        plan, groups = self.plan, len(self.plan.groups)
        run(
            count_over,
            (groups,),
            self.after,
            plan.listed,
            plan.list_capacity,
            plan.parts,
            plan.tiles,
            plan.groups,
            plan.state,
            plan.tile_counts,
            plan.group_counts,
            groups,
            **_sizes(plan),
            num_warps=_FEW_WARPS,
        )

    def extract(self) -> Tensor:
        """Write indices and values; returns how many there are."""
        plan, groups = self.plan, len(self.plan.groups)
        count = self.after.new_empty((), dtype=torch.int64)
        run(
            extract,
            (groups,),
            self.after,
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
            self.selection.indices,
            self.selection.values,
            count,
            plan.size,
            self.selection.indices.numel(),
            groups,
            len(plan.segments),
            SAMPLED=self.is_sampled,
            **_sizes(plan),
            **_WITHDRAWING,
        )
        return count


def _sizes(plan: Plan) -> dict[str, int]:
    return {
        "TILE": plan.tile,
        "GROUP": plan.group,
        "LANES": LANES,
        "CHUNK": min(CHUNK, plan.tile),
        "STATE": STATE,
    }


def _ranked(
    before: Tensor | None,
    addend: Tensor,
    after: Tensor,
    plan: Plan,
    entries: int,
    is_sampled: bool,
) -> Selection:
    """Withdraw by rank; see rank.py."""
    if not len(plan.segments):
        nothing = torch.empty(0, dtype=torch.int64, device=after.device)
        return _taken_at(before, addend, after, plan, nothing)
    selection = _deposited(before, addend, after, plan, entries, lists=True)
    held = after if before is None else before
    ranking = _Ranking(held, addend, after, plan, selection, before is not None, is_sampled)
    given = ranking.arguments()
    for digit in range(3):
        ranking.rank_digits(given, 0, digit, -1)
    ranking.deposit_again()
    for digit in range(5):
        ranking.rank_digits(given, 1, digit, digit - 1)
    ranking.count_over()
    count = ranking.extract()
    return replace(selection, count=count) if is_sampled else selection
