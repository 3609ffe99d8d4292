"""Deposit, choose and withdraw in plain torch: the meaning that any faster kernel must match.

A ledger is a flat tensor with one spare slot behind its last coordinate. Index `size` (that slot)
stands for "nowhere": selectors whose count varies fill their unused room with it.
Indices are ascending inside each piece; equal magnitudes are taken from the lowest position up.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..segments import Segments
from .counter import below, fold, name_key, shuffled, stream


def deposit(before: Tensor | None, addend: Tensor, after: Tensor) -> None:
    """after = before + addend, leaving `before` as it is so that a failed step can go back."""
    target = after[: addend.numel()]
    if before is None:
        target.copy_(addend)
    else:
        torch.add(before[: addend.numel()], addend, out=target)


def take(ledger: Tensor, indices: Tensor) -> Tensor:
    """The values at `indices`, leaving zero behind."""
    values = ledger[indices]
    ledger[indices] = 0
    return values


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


def top_k(ledger: Tensor, segments: Segments) -> Tensor:
    """Indices of the largest magnitudes of every piece, exactly `count` of each."""
    chosen = []
    for start, rows, length, count in segments.grids:
        magnitudes = ledger[start : start + rows * length].abs()
        if rows == 1:
            chosen.append(_top_of(magnitudes, count) + start)
        else:
            mask = _top_mask(magnitudes.view(rows, length), count)
            chosen.append(mask.view(-1).nonzero().squeeze(1) + start)
    return _joined(chosen, ledger.device)


def over_threshold(ledger: Tensor, segments: Segments, sample: int, key: int) -> Tensor:
    """Indices of the magnitudes that reach a threshold found on a strided sample.

    More hits than room in a piece: the largest stay. Fewer: the rest of the message is `size`.
    """
    chosen = []
    for piece in segments.pieces:
        magnitudes = ledger[piece.start : piece.start + piece.length].abs()
        stride = max(1, math.ceil(piece.length / sample))
        seen = magnitudes[fold(key, name_key(piece.name)) % stride :: stride]
        keep = max(1, round(seen.numel() * piece.count / piece.length))
        threshold = seen.kthvalue(seen.numel() - keep + 1).values
        hits = ((magnitudes >= threshold) & (magnitudes > 0)).nonzero().squeeze(1)
        if hits.numel() > piece.room:
            hits = hits[_top_mask(magnitudes[hits][None], piece.room)[0]]
        chosen.append(hits + piece.start)
    hits = _joined(chosen, ledger.device)
    indices = torch.full((segments.room,), segments.size, device=ledger.device)
    indices[: hits.numel()] = hits
    return indices


def random_k(segments: Segments, key: int, device: torch.device) -> Tensor:
    """Indices of `count` coordinates of every piece, chosen uniformly without replacement."""
    table = segments.table(device)
    keys = stream(table.keys, key)[table.owner]
    image = shuffled(table.place, table.lengths[table.owner], keys)
    return (table.starts[table.owner] + image).sort().values


def block_random_k(segments: Segments, key: int, device: torch.device) -> Tensor:
    """Indices of one run of `count` coordinates of every piece: uniform start, wrapping around."""
    table = segments.table(device)
    begin = below(stream(table.keys, key), table.lengths)
    wrapped = (begin + table.counts - table.lengths).clamp_(min=0)[table.owner]
    inside = torch.where(
        table.place < wrapped, table.place, begin[table.owner] + table.place - wrapped
    )
    return table.starts[table.owner] + inside


def _joined(parts: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def take_runs(ledger: Tensor, runs: tuple[tuple[int, int], ...]) -> Tensor:
    """The values of the given runs one after another, leaving zero behind."""
    if not runs:
        return ledger.new_empty(0)
    values = torch.cat([ledger[start:stop] for start, stop in runs])
    for start, stop in runs:
        ledger[start:stop] = 0
    return values


def add_entries(
    flat: Tensor, indices: Tensor, values: Tensor, runs: tuple[tuple[int, int], ...]
) -> None:
    """Add entries at `indices`, and what follows them in `values` to the runs.

    Indices are unique but for "nowhere", where nothing is added: the order is no matter.
    """
    count, size = indices.numel(), flat.numel()
    if count:
        inside = values[:count].masked_fill(indices >= size, 0)
        flat.index_add_(0, indices.clamp(max=size - 1), inside)
    at = count
    for start, stop in runs:
        flat[start:stop] += values[at : at + stop - start]
        at += stop - start
