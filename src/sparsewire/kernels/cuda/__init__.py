"""The kernels for NVIDIA GPUs, in Triton.

One launch serves all pieces; nothing waits for the device, so that a step can be captured in a CUDA
graph once it has run. Ledgers that are not float32 are left to `reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import Taken, reference
from ..bits import packed_bytes
from ..counter import mix_int, signed
from .add import add_messages, find_bounds, put_entries
from .deposit import deposit, gather, round_at_random
from .draw import count_drawn, draw_rest, draw_round, write_drawn, write_runs
from .launch import Arguments, again, run
from .plan import BLOCK, CHUNK, LANES, STATE, TILE, Plan, plan_of, sample_tables
from .rank import count_over, deposit_again, rank, rank_sampled, withdraw
from .wire import (
    check_ascending,
    count_flags,
    digest_block,
    digest_end,
    pack_digits,
    place_flags,
    raise_flags,
    unpack_digits,
)

if TYPE_CHECKING:
    from ...segments import Segments

__all__ = [
    "add_up",
    "block_random_k",
    "chosen",
    "digest",
    "find_flags",
    "is_ascending",
    "narrow",
    "over_threshold",
    "pack",
    "put_back",
    "random_k",
    "set_flags",
    "top_k",
    "unpack",
]

_ADDENDS = (torch.float32, torch.bfloat16, torch.float16)
_BY_LIST = (8, 8, 7)  # bits of what a magnitude has over the floor, digit by digit
_BY_ALL = (8, 8, 8, 7)  # and of a whole magnitude
_WARPS = 8
_LISTING = {"num_warps": 4, "maxnreg": 128}  # enough for whole tiles; the others may spill
_ROUNDS = 3  # of draws that run in parallel
_MESSAGES = 32  # added up in one launch


def top_k(before: Tensor | None, addend: Tensor, after: Tensor, segments: Segments) -> Taken:
    if not _is_ours(before, addend, after, segments):
        return reference.top_k(before, addend, after, segments)
    plan = plan_of(segments, after.device)
    return _ranked(before, addend, after, plan, plan.entries, is_sampled=False)


def over_threshold(
    before: Tensor | None,
    addend: Tensor,
    after: Tensor,
    segments: Segments,
    sample: int,
    key: int,
) -> Taken:
    if not _is_ours(before, addend, after, segments):
        return reference.over_threshold(before, addend, after, segments, sample, key)
    plan = plan_of(segments, after.device)
    if segments.pieces:
        _find_thresholds(before, addend, after, plan, *sample_tables(segments, plan, sample), key)
    return _ranked(before, addend, after, plan, plan.room, is_sampled=True)


def _find_thresholds(
    before: Tensor | None,
    addend: Tensor,
    after: Tensor,
    plan: Plan,
    samples: Tensor,
    blocks: Tensor,
    key: int,
) -> None:
    """They become the floors of the pieces."""
    given = Arguments(
        after if before is None else before,
        addend,
        plan.pieces,
        samples,
        blocks,
        signed(mix_int(key)),
        plan.state,
        plan.histograms,
    )
    shift = sum(_BY_ALL)
    for number, bits in enumerate(_BY_ALL):
        shift -= bits
        again(
            rank_sampled,
            (len(blocks),),
            given,
            HAS_BEFORE=before is not None,
            FIRST=number == 0,
            SHIFT=shift,
            BITS=bits,
            STATE=STATE,
            BLOCK=BLOCK,
        )


def chosen(
    before: Tensor | None, addend: Tensor, after: Tensor, segments: Segments, indices: Tensor
) -> Taken:
    if not _is_ours(before, addend, after, segments):
        return reference.chosen(before, addend, after, segments, indices)
    plan = plan_of(segments, after.device)
    return _taken_at(before, addend, after, plan, indices.contiguous())


def _is_ours(before: Tensor | None, addend: Tensor, after: Tensor, segments: Segments) -> bool:
    return (
        0 < segments.size < 1 << 32  # what a list of 32-bit places can tell apart
        and after.dtype == torch.float32
        and (before is None or before.dtype == torch.float32)
        and addend.dtype in _ADDENDS
        and addend.is_contiguous()
    )


def _deposited(
    before: Tensor | None, addend: Tensor, after: Tensor, plan: Plan, entries: int, lists: bool
) -> Taken:
    """What is known after the first pass: room for the entries, and the whole pieces' values."""
    new = after.new_empty
    taken = Taken(
        new(entries, dtype=torch.int64),
        new(entries + plan.whole_size),
        new(plan.span_count, dtype=torch.float64),
        new((), dtype=torch.int64),
    )
    run(
        deposit,
        (len(plan.tiles),),
        after if before is None else before,
        addend,
        after,
        taken.values,
        plan.tiles,
        plan.state,
        plan.listed,
        plan.parts,
        plan.cursor,
        plan.squares,
        plan.unsound,
        entries,
        plan.capacity,
        plan.capacity,
        HAS_BEFORE=before is not None,
        LISTS=lists,
        TILE=plan.tile,
        STATE=STATE,
        **(_LISTING if lists else {"num_warps": _WARPS}),
    )
    return taken


def _taken_at(
    before: Tensor | None, addend: Tensor, after: Tensor, plan: Plan, indices: Tensor
) -> Taken:
    count = indices.numel()
    taken = _deposited(before, addend, after, plan, count, lists=False)
    blocks = -(-count // BLOCK)
    run(
        gather,
        (blocks + plan.span_count + 1,),
        after,
        indices,
        taken.values,
        count,
        plan.size,
        blocks,
        plan.spans,
        plan.squares,
        plan.unsound,
        taken.squares,
        taken.unsound,
        plan.span_count,
        BLOCK=BLOCK,
    )
    return Taken(indices, taken.values, taken.squares, taken.unsound)


def _ranked(
    before: Tensor | None,
    addend: Tensor,
    after: Tensor,
    plan: Plan,
    entries: int,
    is_sampled: bool,
) -> Taken:
    """Withdraw by rank; see rank.py."""
    groups, pieces = len(plan.groups), len(plan.pieces)
    if not pieces:
        nothing = torch.empty(0, dtype=torch.int64, device=after.device)
        return _taken_at(before, addend, after, plan, nothing)
    taken = _deposited(before, addend, after, plan, entries, lists=True)
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
        plan.capacity,
        plan.parts,
        plan.tiles,
        plan.groups,
        plan.pieces,
        plan.state,
        plan.histograms,
        groups,
        plan.spans,
        plan.squares,
        plan.unsound,
        taken.squares,
        taken.unsound,
        plan.span_count,
    )

    def rank_digits(attempt: int, by_list: int, by_all: int) -> None:
        """One round; digits are numbered from the top, and there may be none."""
        is_inspecting = attempt == 0 and by_list == 0
        again(
            rank,
            (groups + (plan.span_count + 1 if is_inspecting else 0),),
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
            num_warps=_WARPS,
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
        plan.unsound,
        plan.capacity,
        HAS_BEFORE=before is not None,
        TILE=plan.tile,
        STATE=STATE,
        num_warps=_WARPS,
    )
    for digit in range(5):
        rank_digits(1, digit, digit - 1)
    run(
        count_over,
        (groups,),
        after,
        plan.listed,
        plan.capacity,
        plan.parts,
        plan.tiles,
        plan.groups,
        plan.state,
        plan.tile_counts,
        plan.group_counts,
        groups,
        **sizes,
        num_warps=_WARPS,
    )
    run(
        withdraw,
        (groups,),
        after,
        plan.listed,
        plan.capacity,
        plan.parts,
        plan.cursor,
        plan.tiles,
        plan.groups,
        plan.pieces,
        plan.state,
        plan.tile_counts,
        plan.group_counts,
        taken.indices,
        taken.values,
        plan.achieved,
        plan.size,
        entries,
        groups,
        pieces,
        SAMPLED=is_sampled,
        **sizes,
        num_warps=_WARPS,
    )
    return taken


def random_k(segments: Segments, key: int, device: torch.device) -> Tensor:
    if not segments.pieces:
        return torch.empty(0, dtype=torch.int64, device=device)
    plan = plan_of(segments, device)
    pieces, groups = len(plan.pieces), len(plan.groups)
    indices = torch.empty(plan.entries, dtype=torch.int64, device=device)
    blank = torch.zeros(_ROUNDS * pieces + -(-plan.size // 64), dtype=torch.int64, device=device)
    found, bitmap = blank, blank[_ROUNDS * pieces :].view(torch.int32)
    key = signed(key)
    for number in range(_ROUNDS):
        run(
            draw_round,
            (len(plan.draws),),
            bitmap,
            found,
            plan.pieces,
            plan.draws,
            key,
            pieces,
            ROUND=number,
            BLOCK=BLOCK,
        )
    run(draw_rest, (pieces,), bitmap, found, plan.pieces, key, pieces, ROUND=_ROUNDS, BLOCK=BLOCK)
    tables = (plan.tiles, plan.groups, plan.pieces, plan.group_counts)
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


def block_random_k(segments: Segments, key: int, device: torch.device) -> Tensor:
    if not segments.pieces:
        return torch.empty(0, dtype=torch.int64, device=device)
    plan = plan_of(segments, device)
    indices = torch.empty(plan.entries, dtype=torch.int64, device=device)
    run(write_runs, (len(plan.draws),), plan.pieces, plan.draws, indices, signed(key), BLOCK=BLOCK)
    return indices


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


def narrow(wide: Tensor, narrow: Tensor, key: int) -> None:
    count = wide.numel()
    if count:
        words = narrow.view(torch.int16)
        run(round_at_random, (-(-count // TILE),), wide, words, count, signed(key), BLOCK=TILE)


def pack(values: Tensor, width: int) -> Tensor:
    count = values.numel()
    out = values.new_empty(packed_bytes(count, width), dtype=torch.uint8)
    if out.numel():
        groups = -(-count // 8)
        grid = (-(-groups // 256), -(-width // 8))
        run(pack_digits, grid, values.contiguous(), out, count, groups, width, BLOCK=256)
    return out


def unpack(data: Tensor, count: int, width: int) -> Tensor:
    out = data.new_empty(count, dtype=torch.int64)
    if count:
        groups = -(-count // 8)
        run(
            unpack_digits,
            (-(-groups // 256),),
            data.contiguous(),
            out,
            count,
            groups,
            width,
            data.numel(),
            BLOCK=256,
        )
    return out


def set_flags(positions: Tensor, count: int) -> Tensor:
    size = packed_bytes(count, 1)
    words = torch.zeros(-(-size // 4), dtype=torch.int32, device=positions.device)
    many = positions.numel()
    if many and size:
        run(
            raise_flags,
            (-(-many // BLOCK),),
            positions.contiguous(),
            words,
            many,
            8 * size,
            BLOCK=BLOCK,
        )
    return words.view(torch.uint8)[:size]


def find_flags(data: Tensor, count: int) -> Tensor:
    length = data.numel()
    if not length or not count:
        return torch.full((count,), 8 * length, dtype=torch.int64, device=data.device)
    out = data.new_empty(count, dtype=torch.int64)
    data = data.contiguous()
    blocks = -(-length // 2048)
    counts = data.new_empty(blocks, dtype=torch.int64)
    run(count_flags, (blocks,), data, counts, length, BLOCK=2048)
    run(place_flags, (blocks,), data, counts, out, length, count, blocks, BLOCK=2048, num_warps=8)
    return out


def digest(data: Tensor, key: int) -> Tensor:
    words = data.view(torch.int64)
    count = words.numel()
    blocks = -(-count // BLOCK)
    sums = words.new_empty(blocks + 1)
    out = words.new_empty(())
    if count:
        run(digest_block, (blocks,), words, sums, count, BLOCK=BLOCK)
    run(digest_end, (1,), sums, out, signed(mix_int(key)), blocks)
    return out


def is_ascending(indices: Tensor, size: int) -> Tensor:
    out = torch.ones((), dtype=torch.bool, device=indices.device)
    count = indices.numel()
    if count:
        run(
            check_ascending,
            (-(-count // BLOCK),),
            indices.contiguous(),
            out.view(torch.uint8),
            count,
            size,
            BLOCK=BLOCK,
        )
    return out
