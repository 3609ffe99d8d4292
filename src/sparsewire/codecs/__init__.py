"""Codecs: how values and indices are encoded as bytes.

The number of bytes is known in advance. To add a codec, write the class in a module of this folder
and name it in `VALUES` or `INDICES`.
"""

from __future__ import annotations

from .cast import BFloat16, Float16, Float32
from .indices import Bitmap, EliasFano, Implied, IndexCodec, Int32
from .quantized import QSGD, KBit, LloydMax, OneBit, TwoBit
from .values import Place, ValueCodec

__all__ = [
    "INDICES",
    "QSGD",
    "VALUES",
    "BFloat16",
    "Bitmap",
    "EliasFano",
    "Float16",
    "Float32",
    "Implied",
    "IndexCodec",
    "Int32",
    "KBit",
    "LloydMax",
    "OneBit",
    "Place",
    "TwoBit",
    "ValueCodec",
]

VALUES: tuple[type[ValueCodec], ...] = (
    Float32,
    BFloat16,
    Float16,
    OneBit,
    TwoBit,
    KBit,
    LloydMax,
    QSGD,
)
"""All value codecs."""

INDICES: tuple[type[IndexCodec], ...] = (EliasFano, Bitmap, Int32, Implied)
"""All index codecs."""
