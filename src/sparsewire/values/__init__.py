"""How values are written: a codec turns a tensor of values into bytes of known number and back.

To add one: write the class in a module of this folder and name it in `ALL`.
"""

from __future__ import annotations

from .base import Place, ValueCodec
from .cast import BFloat16, Float16, Float32
from .quantized import QSGD, KBit, OneBit, TwoBit

__all__ = [
    "ALL",
    "QSGD",
    "BFloat16",
    "Float16",
    "Float32",
    "KBit",
    "OneBit",
    "Place",
    "TwoBit",
    "ValueCodec",
]

ALL: tuple[type[ValueCodec], ...] = (Float32, BFloat16, Float16, OneBit, TwoBit, KBit, QSGD)
