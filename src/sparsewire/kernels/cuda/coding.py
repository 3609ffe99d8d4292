"""Packed integers, flags, checksums and rounding; `..bits` defines the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...randomness import mix_int, signed
from .. import reference
from ..bits import packed_bytes
from .coding_kernels import (
    check_ascending,
    checksum_block,
    checksum_end,
    count_flags,
    inspect_block,
    inspect_end,
    pack_digits,
    place_flags,
    raise_flags,
    round_at_random,
    unpack_digits,
)
from .launch import run
from .plan import BLOCK, TILE

_MESSAGES = 32  # inspected in one launch


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


write_ascending = partial(reference.write_ascending, pack=pack, set_flags=set_flags)
read_ascending = partial(reference.read_ascending, unpack=unpack, find_flags=find_flags)


def checksum(data: Tensor, key: int) -> Tensor:
    words = data.view(torch.int64)
    count = words.numel()
    blocks = -(-count // BLOCK)
    sums = words.new_empty(blocks + 1)
    out = words.new_empty(())
    if count:
        run(checksum_block, (blocks,), words, sums, count, BLOCK=BLOCK)
    run(checksum_end, (1,), sums, out, signed(mix_int(key)), blocks)
    return out


def inspect(
    messages: Sequence[Tensor],
    entries: Sequence[tuple[Tensor, Tensor]],
    key: int,
    first: int,
    nbytes: int,
    size: int,
) -> Tensor:
    counts = {(indices.numel(), values.numel()) for indices, values in entries}
    if (
        len(counts) != 1
        or any(message.numel() != nbytes for message in messages)
        or any(values.dtype != torch.float32 for _, values in entries)
    ):
        return reference.inspect(
            messages,
            entries,
            key,
            first,
            nbytes,
            size,
            checksum=checksum,
            is_ascending=is_ascending,
        )
    ((index_count, value_count),) = counts
    words = nbytes // 8 - 1
    blocks = max(1, -(-max(words, index_count, value_count) // BLOCK))
    many = len(messages)
    fine = messages[0].new_empty((many, 4), dtype=torch.bool)
    found = messages[0].new_empty(many * (2 * blocks + 1), dtype=torch.int64)
    for at in range(0, many, _MESSAGES):
        some = slice(at, at + _MESSAGES)
        run(
            inspect_block,
            (blocks, len(messages[some])),
            found,
            tuple(message.view(torch.int64) for message in messages[some]),
            tuple(indices.contiguous() for indices, _ in entries[some]),
            tuple(values.contiguous() for _, values in entries[some]),
            words,
            index_count,
            value_count,
            size,
            at,
            blocks,
            MESSAGES=len(messages[some]),
            BLOCK=BLOCK,
        )
    run(inspect_end, (many,), found, fine.view(torch.uint8), signed(key), first, blocks)
    return fine


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
