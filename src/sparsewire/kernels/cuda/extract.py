"""Extraction: the kernel launches, their order and their tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...randomness import mix_int, signed
from ...segments import Segments
from ...workspace import Workspace
from .. import Selection, reference
from .accumulate import accumulate, gather
from .launch import Arguments, again
from .plan import BLOCK, CHUNK, HELD, LANES, STATE, Plan, Sample, plan_of, sample_of
from .rank import count_over, deposit_again, extract, rank
from .sample import bisect_sample, rank_sample

_ADDENDS = (torch.float32, torch.bfloat16, torch.float16)
_BY_LIST = (8, 8, 7)  # bits per digit of a magnitude minus the floor
_BY_ALL = (8, 8, 8, 7)  # bits per digit of a whole magnitude
_WARPS = 8
_FEW_WARPS = 4  # for programs that mostly wait for memory
_WITHDRAWING = {"num_warps": 8, "maxnreg": 64}  # enough registers if all entries are listed
_BISECTING = {"num_warps": 8, "maxnreg": 40}  # for all segments of a transformer at once
_LISTING = {"num_warps": 4, "maxnreg": 128}  # enough for whole tiles; partial tiles may spill


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
    """Store each segment's threshold as its floor."""
    names = {
        "before": after if before is None else before,  # any tensor if there is none
        "addend": addend,
        "segments": plan.segments,
        "samples": sample.rows,
        "numbers": sample.small,
        "blocks": sample.blocks,
        "seen": sample.seen,
        "key": signed(mix_int(key)),
        "state": plan.state,
        "histograms": plan.histograms,
    }
    sizes = {"HAS_BEFORE": before is not None, "STATE": STATE}
    if len(sample.small):
        again(
            bisect_sample,
            (len(sample.small),),
            _given(bisect_sample, names),
            **sizes,
            SEEN=HELD,
            **_BISECTING,
        )
    if not len(sample.blocks):
        return
    given = _given(rank_sample, names)
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
    """Return whether the kernels can add these tensors."""
    return (
        0 < segments.size < 1 << 32  # the list has 32-bit positions
        and (before is None or before.dtype == torch.float32)
        and addend.dtype in _ADDENDS
        and addend.is_contiguous()
    )


def _is_ours(before: Tensor | None, addend: Tensor, after: Tensor, segments: Segments) -> bool:
    return after.dtype == torch.float32 and is_addable(before, addend, segments)


def _names(
    before: Tensor | None, addend: Tensor, after: Tensor, plan: Plan, selection: Selection
) -> dict[str, Any]:
    """Return the arguments of the extraction kernels by parameter name."""
    return {
        "before": after if before is None else before,  # any tensor if there is none
        "addend": addend,
        "after": after,
        "indices": selection.indices,
        "values": selection.values,
        "param_squares": selection.squares,
        "param_non_finite": selection.non_finite,
        "entries": selection.count,
        "capacity": selection.indices.numel(),
        "size": plan.size,
        "tiles": plan.tiles,
        "groups": plan.groups,
        "group_count": len(plan.groups),
        "segments": plan.segments,
        "segment_count": len(plan.segments),
        "param_tiles": plan.params,
        "param_count": plan.param_count,
        "state": plan.state,
        "histograms": plan.histograms,
        "listed": plan.listed,
        "list_capacity": plan.list_capacity,
        "limit": plan.list_capacity,
        "parts": plan.parts,
        "cursor": plan.cursor,
        "squares": plan.squares,
        "non_finite": plan.non_finite,
        "tile_counts": plan.tile_counts,
        "group_counts": plan.group_counts,
    }


def _given(kernel: Any, names: dict[str, Any]) -> Arguments:
    """Return a kernel's arguments, without its constants, whose names are in capitals."""
    parameters = _PARAMETERS.get(id(kernel))  # by id, since hashing a kernel hashes its source
    if parameters is None:
        parameters = tuple(name for name in kernel.arg_names if name.islower())
        _PARAMETERS[id(kernel)] = parameters
    return Arguments(*[names[name] for name in parameters])


_PARAMETERS: dict[int, tuple[str, ...]] = {}


def _deposited(
    before: Tensor | None, addend: Tensor, after: Tensor, plan: Plan, entries: int, lists: bool
) -> tuple[Selection, dict[str, Any]]:
    """Allocate the selection and run the first pass, which writes the dense segments' values.

    Returns:
        The selection, and the arguments of the later passes.
    """
    new = after.new_empty
    selection = Selection(
        new(entries, dtype=torch.int64),
        new(entries + plan.dense_size),
        new(plan.param_count, dtype=torch.float64),
        new((), dtype=torch.int64),
        entries,
    )
    names = _names(before, addend, after, plan, selection)
    again(
        accumulate,
        (len(plan.tiles),),
        _given(accumulate, names),
        HAS_BEFORE=before is not None,
        LISTS=lists,
        TILE=plan.tile,
        STATE=STATE,
        **(_LISTING if lists else {"num_warps": _WARPS}),
    )
    return selection, names


def _taken_at(
    before: Tensor | None, addend: Tensor, after: Tensor, plan: Plan, indices: Tensor
) -> Selection:
    count = indices.numel()
    selection, names = _deposited(before, addend, after, plan, count, lists=False)
    blocks = -(-count // BLOCK)
    names |= {"indices": indices, "count": count, "blocks": blocks}
    again(gather, (blocks + plan.param_count + 1,), _given(gather, names), BLOCK=BLOCK)
    return replace(selection, indices=indices)


@dataclass(frozen=True)
class _Ranking:
    """The launches after the accumulation, which find each segment's rank and extract by it."""

    plan: Plan
    names: dict[str, Any]
    has_before: bool
    is_sampled: bool

    def rank_digits(self, given: Arguments, attempt: int, by_list: int, by_all: int) -> None:
        """Launch one round. Digits are numbered from the top; numbers out of range mean none."""
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
        names = {**self.names, "cursor": self.plan.second_cursor}
        again(
            deposit_again,
            (len(self.plan.groups),),
            _given(deposit_again, names),
            HAS_BEFORE=self.has_before,
            TILE=self.plan.tile,
            STATE=STATE,
            num_warps=_FEW_WARPS,
        )

    def count_over(self) -> None:
        again(
            count_over,
            (len(self.plan.groups),),
            _given(count_over, self.names),
            **_sizes(self.plan),
            num_warps=_FEW_WARPS,
        )

    def extract(self) -> Tensor:
        """Write indices and values, and return their number."""
        count: Tensor = self.names["after"].new_empty((), dtype=torch.int64)
        again(
            extract,
            (len(self.plan.groups),),
            _given(extract, {**self.names, "all_count": count}),
            SAMPLED=self.is_sampled,
            **_sizes(self.plan),
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
    """Extract by rank; see rank.py."""
    if not len(plan.segments):
        nothing = torch.empty(0, dtype=torch.int64, device=after.device)
        return _taken_at(before, addend, after, plan, nothing)
    selection, names = _deposited(before, addend, after, plan, entries, lists=True)
    ranking = _Ranking(plan, names, before is not None, is_sampled)
    given = _given(rank, names)
    for digit in range(3):
        ranking.rank_digits(given, 0, digit, -1)
    ranking.deposit_again()
    for digit in range(5):
        ranking.rank_digits(given, 1, digit, digit - 1)
    ranking.count_over()
    count = ranking.extract()
    return replace(selection, count=count) if is_sampled else selection
