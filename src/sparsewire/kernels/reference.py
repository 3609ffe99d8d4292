"""What the kernels mean, in plain torch on any device; any faster one must agree bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import randomness
from ..randomness import below, fold, join, mix, name_key, signed, stream
from ..segments import Segments
from . import Taken
from .bits import ascending_flags, find_flags, pack, packed_bytes, set_flags, unpack
from .blocks import BlockTable
from .cards import CARD, rotation

if TYPE_CHECKING:
    from ..shards import Shards

__all__ = [
    "add_up",
    "block_norms",
    "block_random_k",
    "chosen",
    "collect",
    "deal",
    "digest",
    "find_flags",
    "inspect",
    "is_ascending",
    "narrow",
    "over_threshold",
    "pack",
    "put_back",
    "random_k",
    "read_ascending",
    "set_flags",
    "top_blocks",
    "top_k",
    "unpack",
    "write_ascending",
]


def top_k(before: Tensor | None, addend: Tensor, after: Tensor, segments: Segments) -> Taken:
    _deposit(before, addend, after)
    return _take(addend, after, segments, _largest(after, segments))


def over_threshold(
    before: Tensor | None,
    addend: Tensor,
    after: Tensor,
    segments: Segments,
    sample: int,
    key: int,
) -> Taken:
    _deposit(before, addend, after)
    hits = _hits(after, segments, sample, key)
    indices = torch.full((segments.room,), segments.size, device=after.device)
    indices[: hits.numel()] = hits
    return replace(_take(addend, after, segments, indices), count=hits.numel())


def chosen(
    before: Tensor | None, addend: Tensor, after: Tensor, segments: Segments, indices: Tensor
) -> Taken:
    _deposit(before, addend, after)
    return _take(addend, after, segments, indices)


def _deposit(before: Tensor | None, addend: Tensor, after: Tensor) -> None:
    target = after[: addend.numel()]
    if before is None:
        target.copy_(addend)
    else:
        torch.add(before[: addend.numel()], addend, out=target)


def _take(addend: Tensor, ledger: Tensor, segments: Segments, indices: Tensor) -> Taken:
    squares, unsound = _inspect(addend, ledger, segments)
    values = ledger[indices]
    ledger[indices] = 0
    if segments.whole_runs:
        values = torch.cat([values, *(ledger[start:stop] for start, stop in segments.whole_runs)])
    for start, stop in segments.whole_runs:
        ledger[start:stop] = 0
    return Taken(indices, values, squares, unsound, indices.numel())


def _inspect(addend: Tensor, ledger: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    spans = [span for span in segments.spans if span.length]
    squares = torch.zeros(len(segments.spans), dtype=torch.float64, device=ledger.device)
    if not spans:
        return squares, torch.tensor(-1, device=ledger.device)
    numbers = torch.tensor([n for n, span in enumerate(segments.spans) if span.length])
    addend = addend.to(torch.promote_types(addend.dtype, torch.float32))
    norms = torch._foreach_norm([addend[span.start : span.stop] for span in spans])
    squares[numbers.to(ledger.device)] = torch.stack(norms).double().square()
    sums = torch._foreach_norm([ledger[span.start : span.stop] for span in spans], math.inf)
    is_bad = ~torch.stack(sums).isfinite()  # the largest magnitude, or NaN
    first = torch.where(is_bad, numbers.to(ledger.device), len(segments.spans)).amin()
    return squares, torch.where(is_bad.any(), first, -1)


def _likely_top(magnitudes: Tensor, count: int) -> Tensor | None:
    """Positions sure to hold the `count` largest, found by a floor from a sample; None for all.

    Exact whatever the sample says: the floor only counts if at least `count` values reach it.
    """
    length = magnitudes.numel()
    if length < 1 << 12 or count * 8 > length:
        return None
    sample = magnitudes[:: max(4, length >> 14)]
    wanted = max(1, math.ceil(sample.numel() * 1.5 * count / length) + 8)
    floor = sample.kthvalue(sample.numel() - wanted + 1).values
    positions = (magnitudes >= floor).nonzero().squeeze(1)
    return positions if count <= positions.numel() < length else None


def _top_mask(rows: Tensor, count: int) -> Tensor:
    """Mark the `count` largest of each row, ties from the left."""
    smallest = rows.topk(count, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    mask = rows >= smallest
    if int(mask.sum()) == count * rows.shape[0]:
        return mask
    above = rows > smallest
    ties = rows == smallest
    missing = count - above.sum(dim=1, keepdim=True)
    return above | (ties & (ties.cumsum(dim=1) <= missing))


def _top_of(magnitudes: Tensor, count: int) -> Tensor:
    """Ascending positions of the `count` largest of one row."""
    positions = _likely_top(magnitudes, count)
    if positions is None:
        return _top_mask(magnitudes[None], count)[0].nonzero().squeeze(1)
    return positions[_top_mask(magnitudes[positions][None], count)[0]]


def _magnitudes(values: Tensor) -> Tensor:
    """Absolute values; what is not a number counts as infinite, so that all devices agree."""
    return values.abs().nan_to_num_(math.inf, math.inf)


def _largest(ledger: Tensor, segments: Segments) -> Tensor:
    found = []
    for start, rows, length, count in segments.grids:
        magnitudes = _magnitudes(ledger[start : start + rows * length])
        if rows == 1:
            found.append(_top_of(magnitudes, count) + start)
        else:
            mask = _top_mask(magnitudes.view(rows, length), count)
            found.append(mask.view(-1).nonzero().squeeze(1) + start)
    return _joined(found, ledger.device)


def _hits(ledger: Tensor, segments: Segments, sample: int, key: int) -> Tensor:
    found = []
    for piece, stride in zip(segments.pieces, segments.strides(sample), strict=True):
        magnitudes = _magnitudes(ledger[piece.start : piece.stop])
        seen = magnitudes[fold(key, name_key(piece.name)) % stride :: stride]
        keep = max(1, round(seen.numel() * piece.count / piece.length))
        threshold = seen.kthvalue(seen.numel() - keep + 1).values
        hits = ((magnitudes >= threshold) & (magnitudes > 0)).nonzero().squeeze(1)
        if hits.numel() > piece.room:
            hits = hits[_top_mask(magnitudes[hits][None], piece.room)[0]]
        found.append(hits + piece.start)
    return _joined(found, ledger.device)


def random_k(segments: Segments, key: int, device: torch.device) -> Tensor:
    """Draw coordinates until `wanted` different ones are marked: those chosen, or those left out.

    Draw number j of a piece is a hash of its key and j. As many are drawn as are still missing,
    which can never be too many, until none is.
    """
    table = segments.table(device)
    keys = stream(table.keys, key)
    wanted = torch.minimum(table.counts, table.lengths - table.counts)
    marked = torch.zeros(segments.size, dtype=torch.bool, device=device)
    drawn = torch.zeros_like(wanted)
    missing = wanted
    while missing.any():
        owner = torch.repeat_interleave(missing)
        number = torch.arange(owner.numel(), device=device) - (missing.cumsum(0) - missing)[owner]
        words = mix(keys[owner] + drawn[owner] + number)
        marked[table.starts[owner] + below(words, table.lengths[owner])] = True
        drawn = drawn + missing
        found = torch.bucketize(marked.nonzero().squeeze(1), table.starts, right=True) - 1
        missing = wanted - torch.bincount(found, minlength=wanted.numel())
    for piece in segments.pieces:
        if piece.count > piece.length - piece.count:
            marked[piece.start : piece.start + piece.length].logical_not_()
    return marked.nonzero().squeeze(1)


def block_random_k(segments: Segments, key: int, device: torch.device) -> Tensor:
    table = segments.table(device)
    begin = below(stream(table.keys, key), table.lengths)
    wrapped = (begin + table.counts - table.lengths).clamp_(min=0)[table.owner]
    inside = torch.where(
        table.place < wrapped, table.place, begin[table.owner] + table.place - wrapped
    )
    return table.starts[table.owner] + inside


def block_norms(before: Tensor | None, addend: Tensor, segments: Segments, block: int) -> Tensor:
    """Added up in halves, which fixes the bits: the first half of a block to the second, and on."""
    table = BlockTable.of(segments, block, addend.device)
    dtype = torch.promote_types(addend.dtype, torch.float32) if before is None else before.dtype
    total = torch.zeros(segments.size + 1, dtype=dtype, device=addend.device)
    _deposit(before, addend, total)
    width = 1 << (block - 1).bit_length()
    inner = torch.arange(width, device=addend.device)
    places = table.starts[:, None] + inner
    places.masked_fill_((places >= table.stops[:, None]), segments.size)
    rows = total[places].square_()
    while width > 1:
        width //= 2
        rows = rows[:, :width] + rows[:, width:]
    return rows.view(-1).float()


def top_blocks(norms: Tensor, segments: Segments, block: int) -> Tensor:
    table, size = BlockTable.of(segments, block, norms.device), segments.size
    # bits of numbers from zero to infinity are ordered as the numbers are
    bits = norms.nan_to_num(math.inf, math.inf).view(torch.int32).clamp_(min=0)
    order = ((table.pieces << 32) - bits).sort(stable=True).indices
    blocks = order[table.slots].sort().values
    indices = table.starts[blocks][:, None] + torch.arange(block, device=norms.device)
    if not table.is_ragged:
        return indices.view(-1)
    inside = (indices < table.stops[blocks][:, None]).view(-1)
    place = torch.where(inside, inside.cumsum(0) - 1, inside.numel())  # "nowhere" goes behind
    packed = torch.full((inside.numel() + 1,), size, device=norms.device)
    packed[place] = torch.where(inside, indices.view(-1), size)
    return packed[:-1]


def _joined(parts: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def add_up(
    flat: Tensor, messages: Sequence[tuple[Tensor, Tensor]], share: float, segments: Segments
) -> None:
    flat.zero_()
    for indices, values in messages:
        _add(flat, indices, values * share, segments)


def put_back(ledger: Tensor, indices: Tensor, errors: Tensor, segments: Segments) -> None:
    _add(ledger[: segments.size], indices, errors, segments)


def _add(flat: Tensor, indices: Tensor, values: Tensor, segments: Segments) -> None:
    """Indices are unique but for "nowhere", where nothing is added: the order is no matter."""
    count, size = indices.numel(), flat.numel()
    if count:
        inside = indices < size
        flat.index_add_(0, indices[inside], values[:count][inside])
    at = count
    for start, stop in segments.whole_runs:
        flat[start:stop] += values[at : at + stop - start]
        at += stop - start


def deal(indices: Tensor, shards: Shards) -> tuple[Tensor, Tensor]:
    table, world, count = shards.table(indices.device), shards.world, indices.numel()
    pieces, slots = table.pieces.numel(), table.fillers.numel()
    span = torch.bucketize(indices, table.starts, right=True) - 1
    card = (indices - table.starts[span]) // CARD
    turn, key = card // world, table.keys[span]
    owner = (card + rotation(turn, key, world)) % world
    local = table.local[owner, span] + turn * CARD + (indices - table.starts[span]) % CARD
    piece = torch.bucketize(indices, table.pieces, right=True) - 1
    group = torch.where(indices < shards.segments.size, owner * pieces + piece, world * pieces)
    group, order = group.sort(stable=True)
    first = torch.searchsorted(group, torch.arange(world * pieces + 1, device=indices.device))
    taken = torch.minimum(first.diff().view(world, pieces), table.rooms)
    begin = taken.cumsum(1) - taken + table.slots[:-1, None]
    number = torch.arange(count, device=indices.device) - first[group]
    # a last group of no slots: "nowhere"
    taken, begin = (torch.nn.functional.pad(t.view(-1), (0, 1)) for t in (taken, begin))
    slot = torch.where(number < taken[group], begin[group] + number, slots)
    places = torch.cat([table.fillers, table.fillers.new_zeros(1)])
    sources = torch.full_like(places, count)
    places[slot] = local[order]
    sources[slot] = order
    return places[:slots], sources[:slots]


def collect(places: Tensor, owner: int, shards: Shards) -> Tensor:
    table, world = shards.table(places.device), shards.world
    if not shards.segments.spans:
        return torch.zeros_like(places)
    span = torch.bucketize(places, table.local[owner], right=True) - 1
    inside = places - table.local[owner][span]
    turn = inside // CARD
    card = (owner - rotation(turn, table.keys[span], world)) % world
    indices = table.starts[span] + (turn * world + card) * CARD + inside % CARD
    inside = (places >= 0) & (places < shards.part(owner).size)
    return torch.where(inside, indices, shards.segments.size)


def narrow(wide: Tensor, narrow: Tensor, key: int) -> None:
    """Four values share the 64 bits drawn for them; what would overflow is cut off instead."""
    count = wide.numel()
    words = mix(torch.arange(-(-count // 4), device=wide.device) + signed(key))
    chance = words.view(torch.int16)[:count].to(torch.int32) & 0xFFFF
    bits = wide.view(torch.int32)
    rounded = bits + chance
    is_finite = (rounded & 0x7F800000) != 0x7F800000
    rounded = torch.where(is_finite, rounded, bits)
    narrow.copy_((rounded >> 16).to(torch.int16).view(torch.bfloat16))


def write_ascending(
    indices: Tensor,
    width: int,
    segments: Segments,
    pack: Callable[[Tensor, int], Tensor] = pack,
    set_flags: Callable[[Tensor, int], Tensor] = set_flags,
) -> Tensor:
    high = (indices >> width).add_(_numbers(segments, indices.device))
    flags = set_flags(high, ascending_flags(segments.room, segments.size, width))
    return torch.cat([pack(indices, width), flags])


def read_ascending(
    data: Tensor,
    width: int,
    segments: Segments,
    unpack: Callable[[Tensor, int, int], Tensor] = unpack,
    find_flags: Callable[[Tensor, int], Tensor] = find_flags,
) -> Tensor:
    split = packed_bytes(segments.room, width)
    flags = find_flags(data[split:], segments.room + 1)
    high = flags[:-1] - _numbers(segments, data.device)
    low = unpack(data[:split], segments.room, width)
    indices = high.bitwise_left_shift_(width).add_(low)
    is_all = flags[-1] == 8 * (data.numel() - split)
    indices[-1] = torch.where(is_all, indices[-1], segments.size + 1)
    return indices


def _numbers(segments: Segments, device: torch.device) -> Tensor:
    """0, 1, 2 … for every slot, kept for every later step."""
    key = ("numbers", device)
    if key not in segments.scratch:
        segments.scratch[key] = torch.arange(segments.room, device=device)
    numbers: Tensor = segments.scratch[key]
    return numbers


def digest(data: Tensor, key: int) -> Tensor:
    return randomness.digest(data.view(torch.int64), key)


def is_ascending(indices: Tensor, size: int) -> Tensor:
    if not indices.numel():
        return torch.tensor(True, device=indices.device)
    rising = (indices[1:] > indices[:-1]) | (indices[1:] == size)
    return rising.all() & (indices[0] >= 0) & (indices <= size).all()


def inspect(
    messages: Sequence[Tensor],
    entries: Sequence[tuple[Tensor, Tensor]],
    key: int,
    first: int,
    nbytes: int,
    size: int,
    digest: Callable[[Tensor, int], Tensor] = digest,
    is_ascending: Callable[[Tensor, int], Tensor] = is_ascending,
) -> Tensor:
    rows = []
    for number, (message, (indices, values)) in enumerate(zip(messages, entries, strict=True)):
        fine = torch.ones((), dtype=torch.bool, device=message.device)
        row = [fine, fine, fine, ~fine]
        if message.numel() == nbytes:
            found = digest(message[:-8], join(key, first + number))
            row[0] = found == message[-8:].view(torch.int64)[0]
            row[1] = is_ascending(indices, size)
            row[2] = finite(values)
            row[3] = fine
        rows.append(torch.stack(row))
    return torch.stack(rows)


def finite(values: Tensor) -> Tensor:
    """Whether all values are: the smallest and the largest tell, and are NaN if any of them is."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    low, high = torch.aminmax(values)
    return low.isfinite() & high.isfinite()
