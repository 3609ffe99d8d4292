"""Rates as people write them, and the buckets made from them."""

from __future__ import annotations

import pytest

from sparsewire.tools.lab import LabError, parse_rate, show_rate
from sparsewire.tools.lab.rates import bucket


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1gbit", 10**9),
        ("100mbit", 10**8),
        ("2.5gbit", 25 * 10**8),
        ("800kbit", 8 * 10**5),
        ("800KBit", 8 * 10**5),
        (" 10 Mbit ", 10**7),
        (".5gbit", 5 * 10**8),
        ("250000bit", 250_000),
    ],
)
def test_rates_are_read(text: str, bits: int) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("100", "'100' is no rate, since its unit is missing: write it like 1gbit"),
        ("100mbps", "since bps means bytes to some programs and bits to others"),
        ("10Mb/s", "since bps means bytes"),
        ("5mb", "since mb is no unit"),
        ("fast", "'fast' is no rate: write it like"),
        ("-1gbit", "is no rate"),
        ("", "is no rate"),
        ("1gbit; rm", "is no rate"),
        ("1e3mbit", "is no rate"),
        ("0mbit", "between 100kbit and 1tbit, not '0mbit'"),
        ("2tbit", "between 100kbit and 1tbit"),
    ],
)
def test_what_is_no_rate(text: str, said: str) -> None:
    with pytest.raises(LabError, match=said):
        parse_rate(text)


@pytest.mark.parametrize("text", ["1gbit", "2.5gbit", "100mbit", "800kbit", "25gbit", "1tbit"])
def test_rates_are_shown_as_they_are_written(text: str) -> None:
    assert show_rate(parse_rate(text)) == text


def test_rates_are_shown_to_four_digits() -> None:
    assert show_rate(133_333_333) == "133.3mbit"
    assert show_rate(0.5) == "0.5bit"


def test_bursts_are_short_and_queues_hold_bursts() -> None:
    for text in ("10mbit", "100mbit", "1gbit", "25gbit"):
        rate = parse_rate(text)
        burst, limit = bucket(rate)
        assert 8 * burst / rate < 0.007
        assert limit > 4 * burst
