"""Packing small integers and flags into bytes: vectorised, and the same bytes on every device.

Eight integers of `width` bits make `width` bytes, the first integer in the lowest bits of the first
byte; wider ones are cut into slices of eight bits, lowest slice first. A flag is one bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GATHER_FLAGS = 0x0102040810204080  # multiplied with eight bytes of 0 or 1, their bits meet on top


def packed_bytes(count: int, width: int) -> int:
    """Bytes that `count` integers of `width` bits take: they travel in groups of eight."""
    return -(-count // 8) * width


def ascending_flags(count: int, size: int, width: int) -> int:
    """Flags that say what `count` ascending indices up to `size` are above their low bits."""
    return count + (size >> width) + 1


def pack(values: Tensor, width: int) -> Tensor:
    """The low `width` bits of integers as `packed_bytes` bytes."""
    groups = -(-values.numel() // 8)
    padded = torch.zeros(groups * 8, dtype=torch.int64, device=values.device)
    padded[: values.numel()] = values
    slices = []
    for low in range(0, width, 8):
        bits = min(8, width - low)
        digits = ((padded >> low) & ((1 << bits) - 1)).view(groups, 8)
        words = (digits << torch.arange(0, 8 * bits, bits, device=values.device)).sum(dim=1)
        slices.append(words.view(torch.uint8).view(groups, 8)[:, :bits].reshape(-1))
    return torch.cat(slices) if slices else padded.new_empty(0, dtype=torch.uint8)


def unpack(data: Tensor, count: int, width: int) -> Tensor:
    """The `count` integers again, as int64."""
    groups = -(-count // 8)
    values = torch.zeros(groups, 8, dtype=torch.int64, device=data.device)
    at = 0
    for low in range(0, width, 8):
        bits = min(8, width - low)
        words = torch.zeros(groups, 8, dtype=torch.uint8, device=data.device)
        words[:, :bits] = data[at : at + groups * bits].view(groups, bits)
        at += groups * bits
        shifts = torch.arange(0, 8 * bits, bits, device=data.device)
        values |= ((words.view(torch.int64) >> shifts) & ((1 << bits) - 1)) << low
    return values.view(-1)[:count]


def set_flags(positions: Tensor, count: int) -> Tensor:
    """`count` flags as bytes, those at `positions` set; positions beyond are left out."""
    flags = torch.zeros(-(-count // 8) * 8 + 1, dtype=torch.uint8, device=positions.device)
    flags[positions.clamp(max=flags.numel() - 1)] = 1
    return ((flags[:-1].view(torch.int64) * _GATHER_FLAGS) >> 56).to(torch.uint8)


def find_flags(data: Tensor, count: int) -> Tensor:
    """Ascending positions of the first `count` flags that are set, then 8·len(data)."""
    table = torch.arange(256, device=data.device)[:, None] >> torch.arange(8, device=data.device)
    spread = (table & 1).to(torch.uint8).view(-1).view(torch.int64)  # eight flags in one word
    found = spread.index_select(0, data.int()).view(torch.uint8).nonzero().squeeze(1)[:count]
    if found.numel() == count:
        return found
    return torch.cat([found, found.new_full((count - found.numel(),), 8 * data.numel())])
