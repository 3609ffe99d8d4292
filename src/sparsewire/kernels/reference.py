"""The definition of the kernels, in plain torch on any device. Faster kernels agree bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import randomness
from ..randomness import below, fold, join, mix, name_key, signed, stream
from ..segments import Segments
from ..shards import BLOCK, Shards, rotation
from ..workspace import Workspace
from . import Selection
from .bits import ascending_flags, find_flags, pack, packed_bytes, set_flags, unpack
from .blocks import BlockTable

__all__ = [
    "add_up",
    "block_norms",
    "block_random_k",
    "checksum",
    "chosen",
    "collect",
    "deal",
    "find_flags",
    "fit_magnitudes",
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

ITERATIONS = 4  # of Lloyd's algorithm


def top_k(
    before: Tensor | None, addend: Tensor, after: Tensor, segments: Segments, work: Workspace
) -> Selection:
    _deposit(before, addend, after)
    return _take(addend, after, segments, _largest(after, segments))


def over_threshold(
    before: Tensor | None,
    addend: Tensor,
    after: Tensor,
    segments: Segments,
    sample: int,
    key: int,
    work: Workspace,
) -> Selection:
    _deposit(before, addend, after)
    hits = _hits(after, segments, sample, key)
    indices = torch.full((segments.capacity,), segments.size, device=after.device)
    indices[: hits.numel()] = hits
    return replace(_take(addend, after, segments, indices), count=hits.numel())


def chosen(
    before: Tensor | None,
    addend: Tensor,
    after: Tensor,
    segments: Segments,
    indices: Tensor,
    work: Workspace,
) -> Selection:
    _deposit(before, addend, after)
    return _take(addend, after, segments, indices)


def _deposit(before: Tensor | None, addend: Tensor, after: Tensor) -> None:
    target = after[: addend.numel()]
    if before is None:
        target.copy_(addend)
    else:
        torch.add(before[: addend.numel()], addend, out=target)


def _take(addend: Tensor, residual: Tensor, segments: Segments, indices: Tensor) -> Selection:
    squares, non_finite = _inspect(addend, residual, segments)
    values = residual[indices]
    residual[indices] = 0
    if segments.dense_runs:
        values = torch.cat([values, *(residual[start:stop] for start, stop in segments.dense_runs)])
    for start, stop in segments.dense_runs:
        residual[start:stop] = 0
    return Selection(indices, values, squares, non_finite, indices.numel())


def _inspect(addend: Tensor, residual: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    params = [param for param in segments.params if param.length]
    squares = torch.zeros(len(segments.params), dtype=torch.float64, device=residual.device)
    if not params:
        return squares, torch.tensor(-1, device=residual.device)
    numbers = torch.tensor([n for n, param in enumerate(segments.params) if param.length])
    addend = addend.to(torch.promote_types(addend.dtype, torch.float32))
    norms = torch._foreach_norm([addend[param.start : param.stop] for param in params])
    squares[numbers.to(residual.device)] = torch.stack(norms).double().square()
    sums = torch._foreach_norm([residual[param.start : param.stop] for param in params], math.inf)
    is_bad = ~torch.stack(sums).isfinite()  # the largest magnitude, or NaN
    first = torch.where(is_bad, numbers.to(residual.device), len(segments.params)).amin()
    return squares, torch.where(is_bad.any(), first, -1)


def _likely_top(magnitudes: Tensor, count: int) -> Tensor | None:
    """Return positions that include the `count` largest, found by a floor; None for all positions.

    The floor comes from a sample. It is used only if at least `count` values reach it, so the
    result is exact.
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
    """Mark the `count` largest of each row; of equal ones, lower positions first."""
    smallest = rows.topk(count, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    mask = rows >= smallest
    if int(mask.sum()) == count * rows.shape[0]:
        return mask
    above = rows > smallest
    ties = rows == smallest
    missing = count - above.sum(dim=1, keepdim=True)
    return above | (ties & (ties.cumsum(dim=1) <= missing))


def _top_of(magnitudes: Tensor, count: int) -> Tensor:
    """Return the ascending positions of the `count` largest of one row."""
    positions = _likely_top(magnitudes, count)
    if positions is None:
        return _top_mask(magnitudes[None], count)[0].nonzero().squeeze(1)
    return positions[_top_mask(magnitudes[positions][None], count)[0]]


def _magnitudes(values: Tensor) -> Tensor:
    """Return absolute values. NaN counts as infinite, so that all devices agree."""
    return values.abs().nan_to_num_(math.inf, math.inf)


def _largest(residual: Tensor, segments: Segments) -> Tensor:
    found = []
    for start, rows, length, count in segments.grids:
        magnitudes = _magnitudes(residual[start : start + rows * length])
        if rows == 1:
            found.append(_top_of(magnitudes, count) + start)
        else:
            mask = _top_mask(magnitudes.view(rows, length), count)
            found.append(mask.view(-1).nonzero().squeeze(1) + start)
    return _joined(found, residual.device)


def _hits(residual: Tensor, segments: Segments, sample: int, key: int) -> Tensor:
    found = []
    for segment, stride in zip(segments.sparse, segments.strides(sample), strict=True):
        magnitudes = _magnitudes(residual[segment.start : segment.stop])
        seen = magnitudes[fold(key, name_key(segment.name)) % stride :: stride]
        keep = max(1, round(seen.numel() * segment.count / segment.length))
        threshold = seen.kthvalue(seen.numel() - keep + 1).values
        hits = ((magnitudes >= threshold) & (magnitudes > 0)).nonzero().squeeze(1)
        if hits.numel() > segment.capacity:
            hits = hits[_top_mask(magnitudes[hits][None], segment.capacity)[0]]
        found.append(hits + segment.start)
    return _joined(found, residual.device)


def random_k(segments: Segments, key: int, device: torch.device, work: Workspace) -> Tensor:
    """Draw coordinates until `wanted` different ones are marked: the chosen or the unchosen ones.

    Draw number j of a segment is a hash of its key and j. Each round draws as many as are still
    missing, which can never be too many.
    """
    table = segments.table(device, work)
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
    for segment in segments.sparse:
        if segment.count > segment.length - segment.count:
            marked[segment.start : segment.start + segment.length].logical_not_()
    return marked.nonzero().squeeze(1)


def block_random_k(segments: Segments, key: int, device: torch.device, work: Workspace) -> Tensor:
    table = segments.table(device, work)
    begin = below(stream(table.keys, key), table.lengths)
    wrapped = (begin + table.counts - table.lengths).clamp_(min=0)[table.owner]
    inside = torch.where(
        table.place < wrapped, table.place, begin[table.owner] + table.place - wrapped
    )
    return table.starts[table.owner] + inside


def block_norms(
    before: Tensor | None, addend: Tensor, segments: Segments, block: int, work: Workspace
) -> Tensor:
    """Sum squares by halves, which fixes the bits: add the second half of a block to the first."""
    table = BlockTable.of(segments, block, addend.device, work)
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


def top_blocks(norms: Tensor, segments: Segments, block: int, work: Workspace) -> Tensor:
    table, size = BlockTable.of(segments, block, norms.device, work), segments.size
    # the bits of numbers from zero to infinity have the order of the numbers
    bits = norms.nan_to_num(math.inf, math.inf).view(torch.int32).clamp_(min=0)
    order = ((table.segments << 32) - bits).sort(stable=True).indices
    blocks = order[table.slots].sort().values
    indices = table.starts[blocks][:, None] + torch.arange(block, device=norms.device)
    if not table.is_ragged:
        return indices.view(-1)
    inside = (indices < table.stops[blocks][:, None]).view(-1)
    place = torch.where(
        inside, inside.cumsum(0) - 1, inside.numel()
    )  # the padding index comes last
    packed = torch.full((inside.numel() + 1,), size, device=norms.device)
    packed[place] = torch.where(inside, indices.view(-1), size)
    return packed[:-1]


def _joined(parts: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def add_up(
    flat: Tensor,
    messages: Sequence[tuple[Tensor, Tensor]],
    share: float,
    segments: Segments,
    work: Workspace,
) -> None:
    flat.zero_()
    for indices, values in messages:
        _add(flat, indices, values * share, segments)


def put_back(
    residual: Tensor, indices: Tensor, errors: Tensor, segments: Segments, work: Workspace
) -> None:
    _add(residual[: segments.size], indices, errors, segments)


def _add(flat: Tensor, indices: Tensor, values: Tensor, segments: Segments) -> None:
    """Add values. Indices are unique except for padding, to which nothing is added."""
    count, size = indices.numel(), flat.numel()
    if count:
        inside = indices < size
        flat.index_add_(0, indices[inside], values[:count][inside])
    at = count
    for start, stop in segments.dense_runs:
        flat[start:stop] += values[at : at + stop - start]
        at += stop - start


def deal(indices: Tensor, shards: Shards, work: Workspace) -> tuple[Tensor, Tensor]:
    table = shards.table(indices.device, work)
    world_size, count = shards.world_size, indices.numel()
    segments, slots = table.segments.numel(), table.fillers.numel()
    param = torch.bucketize(indices, table.starts, right=True) - 1
    block = (indices - table.starts[param]) // BLOCK
    turn, key = block // world_size, table.keys[param]
    owner = (block + rotation(turn, key, world_size)) % world_size
    local = table.local[owner, param] + turn * BLOCK + (indices - table.starts[param]) % BLOCK
    segment = torch.bucketize(indices, table.segments, right=True) - 1
    group = torch.where(
        indices < shards.segments.size, owner * segments + segment, world_size * segments
    )
    group, order = group.sort(stable=True)
    first = torch.searchsorted(
        group, torch.arange(world_size * segments + 1, device=indices.device)
    )
    selection = torch.minimum(first.diff().view(world_size, segments), table.capacities)
    begin = selection.cumsum(1) - selection + table.slots[:-1, None]
    number = torch.arange(count, device=indices.device) - first[group]
    # a last group of no slots: the padding index
    selection, begin = (torch.nn.functional.pad(t.view(-1), (0, 1)) for t in (selection, begin))
    slot = torch.where(number < selection[group], begin[group] + number, slots)
    places = torch.cat([table.fillers, table.fillers.new_zeros(1)])
    sources = torch.full_like(places, count)
    places[slot] = local[order]
    sources[slot] = order
    return places[:slots], sources[:slots]


def collect(places: Tensor, owner: int, shards: Shards, work: Workspace) -> Tensor:
    table, world_size = shards.table(places.device, work), shards.world_size
    if not shards.segments.params:
        return torch.zeros_like(places)
    param = torch.bucketize(places, table.local[owner], right=True) - 1
    inside = places - table.local[owner][param]
    turn = inside // BLOCK
    block = (owner - rotation(turn, table.keys[param], world_size)) % world_size
    indices = table.starts[param] + (turn * world_size + block) * BLOCK + inside % BLOCK
    inside = (places >= 0) & (places < shards.part(owner).size)
    return torch.where(inside, indices, shards.segments.size)


def narrow(wide: Tensor, narrow: Tensor, key: int) -> None:
    """Round up or down at random. Four values share 64 random bits; overflow is clipped."""
    count = wide.numel()
    words = mix(torch.arange(-(-count // 4), device=wide.device) + signed(key))
    chance = words.view(torch.int16)[:count].to(torch.int32) & 0xFFFF
    bits = wide.view(torch.int32)
    rounded = bits + chance
    is_finite = (rounded & 0x7F800000) != 0x7F800000
    rounded = torch.where(is_finite, rounded, bits)
    narrow.copy_((rounded >> 16).to(torch.int16).view(torch.bfloat16))


def fit_magnitudes(
    values: Tensor, counts: Tensor, shares: Tensor, levels: int
) -> tuple[Tensor, Tensor]:
    segment = torch.repeat_interleave(counts, output_size=values.numel())
    sizes = values.abs().double()

    def total(numbers: Tensor) -> Tensor:
        return torch.segment_reduce(numbers, "sum", lengths=counts, unsafe=True)

    def nearest(magnitudes: Tensor) -> Tensor:
        edges = (magnitudes[:-1].double() + magnitudes[1:].double()) / 2
        return torch.stack([sizes > edge.index_select(0, segment) for edge in edges]).sum(dim=0)

    means = total(sizes) / shares.clamp(min=1)
    magnitudes = torch.stack([_single(means * share) for share in first_magnitudes(levels)])
    for _ in range(ITERATIONS):
        number = nearest(magnitudes)
        groups = [number == level for level in range(levels)]
        lengths = [total(group.double()) for group in groups[1:]]
        lengths.insert(0, shares - sum(lengths))  # padding is not a value
        for level, (group, length) in enumerate(zip(groups, lengths, strict=True)):
            mean = total(torch.where(group, sizes, 0)) / length.clamp(min=1)
            magnitudes[level] = torch.where(length > 0, _single(mean), magnitudes[level])
    return magnitudes, nearest(magnitudes)


def first_magnitudes(levels: int) -> list[float]:
    """Return the magnitudes that Lloyd's algorithm begins with, as multiples of the mean."""
    return [(2 * levels) ** (level / (levels - 1)) / 2 for level in range(levels)]


def _single(numbers: Tensor) -> Tensor:
    return numbers.clamp(max=torch.finfo(torch.float32).max).float()


def write_ascending(
    indices: Tensor,
    width: int,
    segments: Segments,
    pack: Callable[[Tensor, int], Tensor] = pack,
    set_flags: Callable[[Tensor, int], Tensor] = set_flags,
) -> Tensor:
    high = (indices >> width).add_(torch.arange(segments.capacity, device=indices.device))
    flags = set_flags(high, ascending_flags(segments.capacity, segments.size, width))
    return torch.cat([pack(indices, width), flags])


def read_ascending(
    data: Tensor,
    width: int,
    segments: Segments,
    unpack: Callable[[Tensor, int, int], Tensor] = unpack,
    find_flags: Callable[[Tensor, int], Tensor] = find_flags,
) -> Tensor:
    split = packed_bytes(segments.capacity, width)
    flags = find_flags(data[split:], segments.capacity + 1)
    high = flags[:-1] - torch.arange(segments.capacity, device=data.device)
    low = unpack(data[:split], segments.capacity, width)
    indices = high.bitwise_left_shift_(width).add_(low)
    is_all = flags[-1] == 8 * (data.numel() - split)
    indices[-1] = torch.where(is_all, indices[-1], segments.size + 1)
    return indices


def checksum(data: Tensor, key: int) -> Tensor:
    return randomness.checksum(data.view(torch.int64), key)


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
    checksum: Callable[[Tensor, int], Tensor] = checksum,
    is_ascending: Callable[[Tensor, int], Tensor] = is_ascending,
) -> Tensor:
    rows = []
    for number, (message, (indices, values)) in enumerate(zip(messages, entries, strict=True)):
        fine = torch.ones((), dtype=torch.bool, device=message.device)
        row = [fine, fine, fine, ~fine]
        if message.numel() == nbytes:
            found = checksum(message[:-8], join(key, first + number))
            row[0] = found == message[-8:].view(torch.int64)[0]
            row[1] = is_ascending(indices, size)
            row[2] = finite(values)
            row[3] = fine
        rows.append(torch.stack(row))
    return torch.stack(rows)


def finite(values: Tensor) -> Tensor:
    """Return whether all values are finite. Minimum and maximum suffice: NaN spreads to both."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    low, high = torch.aminmax(values)
    return low.isfinite() & high.isfinite()
