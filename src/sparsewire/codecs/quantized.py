"""Value codecs with a few bits per selected value, and float32 centres that scale them.

Values that are sent densely are few and important. They are sent as bfloat16.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import kernels
from ..errors import SchemeError
from ..kernels import bits as packing
from ..randomness import mix, stream
from ..segments import ParamSlice, Segments
from .values import Place, ValueCodec, from_bytes, to_bytes

_WHOLE = torch.bfloat16
_MOST = torch.finfo(torch.float32).max
_MOST_VALUES = 1 << 31  # no message has as many


class _Quantized(ValueCodec):
    """Base class: centres, then the packed codes of the selected values, then the dense values."""

    linear = False
    quantizes = True
    dtype = _WHOLE

    @property
    @abstractmethod
    def width(self) -> int:
        """Bits per selected value."""

    @abstractmethod
    def centres(self, segments: Segments) -> int:
        """Return how many float32 centres a message holds."""

    @abstractmethod
    def quantize(self, values: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        """Return the centres, and an integer of `width` bits for every selected value."""

    @abstractmethod
    def restore(self, centres: Tensor, codes: Tensor, place: Place) -> Tensor:
        """Return the values that the codes stand for."""

    def exact(self, dtype: torch.dtype) -> bool:
        return False

    def nbytes(self, segments: Segments) -> int:
        codes = packing.packed_bytes(segments.capacity, self.width)
        centres = self.centres(segments) if segments.capacity else 0
        return 4 * centres + codes + _WHOLE.itemsize * segments.dense_size

    def encode(self, values: Tensor, place: Place) -> Tensor:
        capacity = place.segments.capacity
        if not capacity:
            return to_bytes(values, _WHOLE)
        selected = values[:capacity]
        if selected.dtype == torch.float64:
            selected = selected.clamp(-_MOST, _MOST).float()
        centres, codes = self.quantize(selected, place)
        return torch.cat(
            [
                to_bytes(centres, torch.float32),
                kernels.on(codes.device).pack(codes, self.width),
                to_bytes(values[capacity:], _WHOLE),
            ]
        )

    def decode(self, data: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
        capacity = place.segments.capacity
        if not capacity:
            return from_bytes(data, _WHOLE).to(dtype)
        split = 4 * self.centres(place.segments)
        end = split + packing.packed_bytes(capacity, self.width)
        centres = from_bytes(data[:split], torch.float32)
        codes = kernels.on(data.device).unpack(data[split:end], capacity, self.width)
        selected = self.restore(centres, codes, place)
        return torch.cat([selected.to(dtype), from_bytes(data[end:], _WHOLE).to(dtype)])


def _mean_magnitudes(values: Tensor, counts: Tensor, place: Place) -> Tensor:
    """Return the mean |value| of each segment, summed in float64 so that the order has no effect.

    Zeros count like other values, since they are decoded as ± a centre too. Without them, a few
    large values among zeros would come back much too large.
    """
    sums = torch.segment_reduce(values.abs().double(), "sum", lengths=counts, unsafe=True)
    return sums / _shares(values, counts, place).clamp(min=1)


def _shares(values: Tensor, counts: Tensor, place: Place) -> Tensor:
    """Return how many values each segment has without padding, which is at the end of the last."""
    shares = counts.clone()
    shares[-1] -= values.numel() - _before(place, place.segments.size)
    return shares


def _before(place: Place, index: int) -> Tensor:
    """Return how many selected values lie before a coordinate."""
    return torch.searchsorted(place.indices, index)


def _counts(place: Place) -> Tensor:
    """Return how many selected values each segment has. They are neighbours, since indices ascend.

    The padding index counts as part of the last segment. Corrupt indices give wrong counts, which
    do no harm.
    """
    starts = place.segments.table(place.indices.device, place.work).starts
    edges = torch.searchsorted(place.indices, starts)
    edges[:1].zero_()  # a number written by itself would wait for the device
    end = edges.new_full((1,), place.indices.numel())
    return torch.diff(edges.cummax(0).values, append=end)


def _segments(place: Place, counts: Tensor) -> Tensor:
    """Return the number of the segment that each selected value belongs to."""
    return torch.repeat_interleave(counts, output_size=place.indices.numel())


def _columns(place: Place) -> Tensor:
    """Return the number of the column, over all parameters, that each selected value is in."""
    device = place.indices.device
    starts, widths, first = place.work.kept(
        place.segments, ("columns", device), lambda: _column_table(place.segments, device)
    )
    # the padding index counts with the last column: nothing is ever added there
    inside = place.indices.clamp(
        max=place.segments.sparse[-1].stop - 1 if place.indices.numel() else 0
    )
    param = torch.bucketize(inside, starts, right=True) - 1
    column: Tensor = first[param] + (inside - starts[param]) % widths[param]
    return column


def _column_table(segments: Segments, device: torch.device) -> Tensor:
    """Return three rows: the start of every parameter that is selected from, the number of its
    columns, and the number of columns before it."""
    params = _selected_spans(segments)
    widths = [_column_count(param.shape) for param in params]
    first = [sum(widths[:number]) for number in range(len(params))]
    rows = ([param.start for param in params], widths, first)
    return torch.tensor(rows, dtype=torch.int64).to(device)


def _selected_spans(segments: Segments) -> list[ParamSlice]:
    """Return the parameters that are not sent densely."""
    whole = [(segment.start, segment.start + segment.length) for segment in segments.dense]
    return [
        param
        for param in segments.params
        if param.length
        and not any(start <= param.start and param.stop <= stop for start, stop in whole)
    ]


def _column_count(shape: tuple[int, ...]) -> int:
    return max(1, math.prod(shape[1:]))


@dataclass(frozen=True, repr=False)
class OneBit(_Quantized):
    """Encode selected values in one bit: the sign, which stands for plus or minus a centre.

    Centres are float32 and are part of the message. Values that are sent densely go as bfloat16,
    here and with the other quantizing codecs. The error returns to the residual.

    Arguments:
        centre: `'global'`: the mean magnitude of the values sent of the segment. `'column'`: that
            of the column of the weight matrix (Dryden). `'threshold'`: the smallest magnitude sent
            of the segment (Strom).

    >>> import torch
    >>> import sparsewire as sw
    >>> scheme = sw.Scheme(sw.TopK(count=2), values=sw.OneBit(), dense_below=0, dense_1d=False)
    >>> state = sw.functional.init(scheme, {"w": torch.zeros(4)})
    >>> gradient = {"w": torch.tensor([5.0, 0.0, -3.0, 1.0])}
    >>> mean, state = sw.functional.exchange(gradient, state, sw.groups.Alone())
    >>> mean["w"].tolist(), state.memory["w"]["residual"].tolist()
    ([4.0, 0.0, -4.0, 0.0], [1.0, 0.0, 1.0, 1.0])

    Reference: Aji & Heafield 2017, section 3.4.
    """

    centre: Literal["threshold", "column", "global"] = "global"
    width: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.centre not in ("threshold", "column", "global"):
            raise SchemeError(
                f"OneBit's centre must be 'threshold', 'column' or 'global', not {self.centre!r}"
            )

    def centres(self, segments: Segments) -> int:
        if self.centre == "column":
            return sum(_column_count(param.shape) for param in _selected_spans(segments))
        return len(segments.sparse)

    def quantize(self, values: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        if self.centre == "column":
            centres = self._column_means(values, place)
        else:
            counts = _counts(place)
            centres = _mean_magnitudes(values, counts, place).float()
        if self.centre == "threshold":
            # the smallest but for zeros, where the mean bounds it: it must not be 0 for ever
            sizes = values.abs().masked_fill_(values == 0, math.inf)
            least = torch.segment_reduce(sizes, "min", lengths=counts, unsafe=True)
            centres = torch.minimum(centres, least)
        return centres, (values < 0).long()

    def _column_means(self, values: Tensor, place: Place) -> Tensor:
        owner = _columns(place)
        sums = torch.zeros(self.centres(place.segments), dtype=torch.float64, device=values.device)
        shares = torch.zeros_like(sums)
        sums.index_add_(0, owner, values.abs().double())
        shares.index_add_(0, owner, (place.indices < place.segments.size).double())
        return (sums / shares.clamp(min=1)).float()

    def restore(self, centres: Tensor, codes: Tensor, place: Place) -> Tensor:
        owner = _columns(place) if self.centre == "column" else _segments(place, _counts(place))
        return centres.index_select(0, owner) * (1 - 2 * codes)


class _Steps(_Quantized):
    """Base class: a sign and the number of a step, ±step·(½ + number).

    step = 2·mean|x| / 2^(width−1). What lies beyond the last step stays in the residual.
    """

    def centres(self, segments: Segments) -> int:
        return len(segments.sparse)

    def quantize(self, values: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        levels = 1 << (self.width - 1)
        counts = _counts(place)
        means = _mean_magnitudes(values, counts, place)
        steps = (means * (2 / levels)).clamp(max=_MOST / levels).float()
        own = steps.index_select(0, _segments(place, counts))
        number = (values.abs() / own).nan_to_num_(0, levels, 0).clamp_(max=levels - 1).long()
        return steps, number.mul_(2).add_(values < 0)

    def restore(self, centres: Tensor, codes: Tensor, place: Place) -> Tensor:
        own = centres.index_select(0, _segments(place, _counts(place)))
        number = torch.arange(1 << self.width, device=codes.device)
        meaning = ((number >> 1) + 0.5) * (1 - 2 * (number & 1))
        return own * meaning.index_select(0, codes)


@dataclass(frozen=True, repr=False)
class TwoBit(_Steps):
    """Encode selected values in two bits: the sign, and whether the magnitude is above the mean.

    With the mean magnitude m of the segment, values are decoded as ±m/2 or ±3m/2.

    >>> import sparsewire as sw
    >>> e = sw.explain("Scheme(TopK(0.01), values=TwoBit())", {"w": (1000, 1000)}, workers=2)
    >>> print(f"{e.dense_float32_bytes / e.sent_bytes:.0f}x less than dense float32")
    301x less than dense float32

    Reference: Aji & Heafield's Marian code.
    """

    width: ClassVar[int] = 2


@dataclass(frozen=True, repr=False)
class KBit(_Steps):
    """Encode selected values in a few bits: the sign, and one of 2^(bits−1) equal steps.

    The steps reach up to twice the mean magnitude of the segment, and values are decoded as the
    middle of their step. `KBit(1)` decodes like `OneBit()`, and `KBit(2)` like `TwoBit()`.

    Arguments:
        bits: Bits per selected value, from 1 to 16.

    >>> import sparsewire as sw
    >>> segments = sw.segments.Segments.partition({"w": (1000, 100)}, sw.TopK(0.01))
    >>> sw.KBit(4).nbytes(segments)  # 1000 values of 4 bits, and one float32
    504

    Reference: Aji & Heafield's Marian code.
    """

    bits: int = 4

    def __post_init__(self) -> None:
        _check_bits("KBit", self.bits, 1)

    @property
    def width(self) -> int:
        return self.bits


@dataclass(frozen=True, repr=False)
class LloydMax(_Quantized):
    """Encode selected values in a few bits: the sign, and one of 2^(bits−1) magnitudes that fit.

    The magnitudes of each segment are chosen to minimise the square error, by a few iterations of
    Lloyd's algorithm, and are part of the message. A large value is therefore sent as large.
    `TwoBit()` and `KBit()` send at most twice the mean, so a coordinate whose values are always
    large falls behind. Use it with `Sharded()`, which quantizes values on the way to an owner and
    again on the way back. With `AllGather()`, training was more accurate with `TwoBit()`.

    Arguments:
        bits: Bits per selected value, from 2 to 8. Use 3 if 5 % or more are sent.

    >>> import torch
    >>> import sparsewire as sw
    >>> scheme = sw.Scheme(sw.TopK(count=4), values=sw.LloydMax(2), dense_below=0, dense_1d=False)
    >>> state = sw.functional.init(scheme, {"w": torch.zeros(5)})
    >>> gradient = {"w": torch.tensor([50.0, 2.0, -3.0, 1.0, 0.5])}
    >>> mean, state = sw.functional.exchange(gradient, state, sw.groups.Alone())
    >>> mean["w"].tolist(), state.memory["w"]["residual"].tolist()
    ([50.0, 2.0, -2.0, 2.0, 0.0], [0.0, 0.0, -1.0, -1.0, 0.5])

    Reference: Lloyd 1982; Max 1960.
    """

    bits: int = 2

    def __post_init__(self) -> None:
        _check_bits("LloydMax", self.bits, 2, 8)

    @property
    def width(self) -> int:
        return self.bits

    @property
    def _levels(self) -> int:
        return 1 << (self.bits - 1)

    def centres(self, segments: Segments) -> int:
        return len(segments.sparse) * self._levels

    def quantize(self, values: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        counts = _counts(place)
        fit = kernels.on(values.device).fit_magnitudes
        centres, number = fit(values, counts, _shares(values, counts, place), self._levels)
        return centres.flatten(), number * 2 + (values < 0)

    def restore(self, centres: Tensor, codes: Tensor, place: Place) -> Tensor:
        segment = _segments(place, _counts(place))
        own = centres.index_select(0, (codes >> 1) * len(place.segments.sparse) + segment)
        return own * (1 - 2 * (codes & 1))


@dataclass(frozen=True, repr=False)
class QSGD(_Quantized):
    """Encode selected values in a few bits: the sign, and a share of a norm, rounded at random.

    Every `bucket` consecutive values share a norm. With s = 2^(bits−1) − 1, the level `s·|x|/‖x‖`
    is rounded up with the probability of its fraction, so that the decoded values are right on
    average. The mean square error is at most min(bucket/s², √bucket/s) times the square of the
    values. Error feedback needs an error smaller than the values, so keep the bucket smaller than
    s². Random numbers are a hash of seed, step, rank and coordinate.

    Arguments:
        bits: Bits per selected value, from 2 to 16.
        bucket: How many values share a norm, which takes four bytes.

    >>> import sparsewire as sw
    >>> segments = sw.segments.Segments.partition({"w": (1000, 100)}, sw.TopK(0.01))
    >>> sw.QSGD(8, bucket=100).nbytes(segments)  # 1000 bytes, and ten norms
    1040

    Reference: Alistarh et al. 2017.
    """

    bits: int = 4
    bucket: int = 16

    def __post_init__(self) -> None:
        _check_bits("QSGD", self.bits, 2)
        is_whole = isinstance(self.bucket, int) and not isinstance(self.bucket, bool)
        if not is_whole or not 1 <= self.bucket < _MOST_VALUES:
            raise SchemeError(
                f"QSGD's bucket must be a whole number from 1 to 2^31 - 1, such as 16, not "
                f"{self.bucket!r}"
            )

    @property
    def width(self) -> int:
        return self.bits

    def centres(self, segments: Segments) -> int:
        return sum(-(-segment.capacity // self.bucket) for segment in segments.sparse)

    def _owner(self, place: Place, segment: Tensor, counts: Tensor) -> Tensor:
        """Return the number of the bucket that each selected value belongs to."""
        capacities = place.segments.table(segment.device, place.work).capacities
        buckets = (capacities + (self.bucket - 1)) // self.bucket
        first = (torch.cumsum(buckets, 0) - buckets).index_select(0, segment)
        begin = (torch.cumsum(counts, 0) - counts).index_select(0, segment)
        number = torch.arange(segment.numel(), device=segment.device) - begin
        # the padding index may go beyond the last bucket, and adds nothing there
        return (first + number // self.bucket).clamp_(0, self.centres(place.segments) - 1)

    def quantize(self, values: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        counts = _counts(place)
        segment = _segments(place, counts)
        owner, levels = self._owner(place, segment, counts), (1 << (self.bits - 1)) - 1
        squares = torch.zeros(
            self.centres(place.segments), dtype=torch.float64, device=values.device
        )
        squares.index_add_(0, owner, values.double().square())
        norms = squares.sqrt().clamp(max=_MOST).float()
        level = (values.abs() / norms.index_select(0, owner) * levels).nan_to_num(0, levels, 0)
        # by name and place in the segment, wherever that lies in the message: DDP moves it
        table = place.segments.table(segment.device, place.work)
        dice = stream(table.keys, place.key).index_select(0, segment)
        inside = place.indices - table.starts.index_select(0, segment)
        chance = (mix(dice + inside) & ((1 << 24) - 1)) / (1 << 24)
        number = (level + chance).floor().clamp(max=levels).long()
        return norms, number * 2 + (values < 0)

    def restore(self, centres: Tensor, codes: Tensor, place: Place) -> Tensor:
        levels = (1 << (self.bits - 1)) - 1
        counts = _counts(place)
        own = centres.index_select(0, self._owner(place, _segments(place, counts), counts))
        # a share of the norm first, lest the product overflow; tensor by tensor, since dividing
        # by a number gives other bits on a GPU than on a CPU
        share = (codes >> 1) / torch.full_like(codes, levels)
        return own * share * (1 - 2 * (codes & 1))


def _check_bits(name: str, bits: int, least: int, most: int = 16) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or not least <= bits <= most:
        raise SchemeError(
            f"{name}'s bits must be a whole number from {least} to {most}, not {bits!r}"
        )
