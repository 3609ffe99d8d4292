"""Rates as `tc` writes them, and the token bucket that holds a link to one."""

from __future__ import annotations

import re
from decimal import Decimal

from .commands import LabError

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_LEAST, _MOST = 10**5, 10**12
_LEAST_BURST, _LEAST_QUEUE = 8 << 10, 48 << 10  # bytes: 5 and 32 frames
_WRITTEN = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z/]*)")


def parse_rate(text: str) -> int:
    """The bits per second that a text like "1gbit", "2.5gbit" or "800kbit" asks for.

    >>> parse_rate("2.5Gbit")
    2500000000
    """
    written = _WRITTEN.fullmatch(text.strip().lower())
    if written is None or written[2] not in _UNITS:
        raise LabError(
            f"{text!r} is no rate{_hint(written)}: write it like 1gbit, 100mbit, 800kbit"
        )
    bits = int(Decimal(written[1]) * _UNITS[written[2]])
    if not _LEAST <= bits <= _MOST:
        raise LabError(
            f"a rate must lie between {show_rate(_LEAST)} and {show_rate(_MOST)}, not {text!r}"
        )
    return bits


def _hint(written: re.Match[str] | None) -> str:
    if written is None:
        return ""
    if not written[2]:
        return ", since its unit is missing"
    if written[2].endswith(("bps", "b/s")):
        return ", since bps means bytes to some programs and bits to others"
    return f", since {written[2]} is no unit"


def show_rate(bits: float) -> str:
    """A rate for people and for `tc`, to four digits.

    >>> show_rate(parse_rate("0.1gbit")), show_rate(957_312_345)
    ('100mbit', '957.3mbit')
    """
    for unit, size in reversed(_UNITS.items()):
        if bits >= size:
            return f"{float(f'{bits / size:.4g}'):g}{unit}"
    return f"{bits:.4g}bit"


def bucket(rate: int) -> tuple[int, int]:
    """Return the bytes a link may send at once after a pause, and the size of its queue.

    The first are a gift: one of 64 KB, as large as packets get inside a machine, would be 52 ms
    of a 10 Mbit/s link, more than a sparse message takes. But a bucket that holds less than a
    millisecond's worth overflows whenever the kernel is late. Packets that do not fit are cut
    into frames. The others are the buffer of a switch, where several senders may meet.
    """
    millisecond = rate // 8000
    return max(millisecond, _LEAST_BURST), max(5 * millisecond, _LEAST_QUEUE)
