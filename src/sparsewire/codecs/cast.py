"""Value codecs that cast every value to a float type."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..segments import Segments
from .values import Place, ValueCodec, from_bytes, to_bytes


class _Cast(ValueCodec):
    """Base class of the casts: one number for each value, selected or sent densely."""

    linear = True

    def nbytes(self, segments: Segments) -> int:
        return (segments.capacity + segments.dense_size) * self.dtype.itemsize

    def exact(self, dtype: torch.dtype) -> bool:
        return torch.promote_types(self.dtype, dtype) == self.dtype

    def encode(self, values: Tensor, place: Place) -> Tensor:
        return to_bytes(values, self.dtype)

    def decode(self, data: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
        return from_bytes(data, self.dtype).to(dtype)


@dataclass(frozen=True, repr=False)
class Float32(_Cast):
    """Encode values in 32 bits, exactly for float32 gradients. The default.

    >>> import sparsewire as sw
    >>> sw.Scheme(sw.TopK(0.01)).values
    Float32()
    """

    dtype = torch.float32


@dataclass(frozen=True, repr=False)
class BFloat16(_Cast):
    """Encode values in 16 bits, with float32's range and 8 bits of precision.

    >>> import sparsewire as sw
    >>> segments = sw.segments.Segments.partition({"w": (1000, 100)}, sw.TopK(0.01))
    >>> sw.BFloat16().nbytes(segments)
    2000
    """

    dtype = torch.bfloat16


@dataclass(frozen=True, repr=False)
class Float16(_Cast):
    """Encode values in 16 bits, with 11 bits of precision.

    The largest magnitude is 65504. The rest of a larger value stays in the residual and follows in
    the next steps.

    >>> import torch
    >>> import sparsewire as sw
    >>> scheme = sw.Scheme(sw.TopK(count=1), values=sw.Float16(), dense_below=0, dense_1d=False)
    >>> state = sw.functional.init(scheme, {"w": torch.zeros(2)})
    >>> for gradient in (torch.tensor([100_000.0, 0.0]), torch.zeros(2)):
    ...     mean, state = sw.functional.exchange({"w": gradient}, state, sw.groups.Alone())
    ...     print(mean["w"].tolist())
    [65504.0, 0.0]
    [34496.0, 0.0]
    """

    dtype = torch.float16
