"""Quantities as people read them."""

from __future__ import annotations


def say_seconds(seconds: float, beside: float = 0.0) -> str:
    """Return a time with its unit, chosen for the larger of `seconds` and `beside`.

    >>> say_seconds(0.687), say_seconds(0.687, beside=2.26), say_seconds(12.34)
    ('687 ms', '0.69 s', '12.3 s')
    """
    if max(seconds, beside) >= 1:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    milliseconds = 1000 * seconds
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2}f} ms"


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds without the unit; less than 0.05 ms is a dot.

    >>> milliseconds(1.2345), milliseconds(0.0123), milliseconds(0.00001)
    ('1,234', '12.3', '·')
    """
    value = 1000 * seconds
    if value < 0.05:
        return "·"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def say_rate(bits: float) -> str:
    """Return a rate with its unit.

    >>> say_rate(10**9), say_rate(957.3e6)
    ('1 Gbit/s', '957 Mbit/s')
    """
    for size, unit in ((10**9, "Gbit/s"), (10**6, "Mbit/s"), (10**3, "kbit/s")):
        if bits >= size:
            return f"{float(f'{bits / size:.3g}'):g} {unit}"
    return f"{bits:.0f} bit/s"


def place_in_words(network: str, rate: int | None) -> str:
    """Return a network as a phrase.

    >>> place_in_words("lab", 10**9)
    'at 1 Gbit/s'
    """
    if network == "loopback":
        return "over loopback"
    return "over unshaped links" if rate is None else f"at {say_rate(rate)}"
