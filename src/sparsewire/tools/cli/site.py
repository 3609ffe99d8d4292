"""Where workers run: on this machine's loopback, or on a lab with links as slow as asked."""

from __future__ import annotations

from ..lab import Lab, LabError, Loopback, obstacle, parse_rate
from .errors import USAGE, CommandError

Site = Lab | Loopback


def choose(hosts: int, rate: str | None) -> Site:
    """A lab if there is a `rate` to hold its links to, loopback if not; to be entered yet.

    Raises:
        CommandError: no lab can be built here.
    """
    if rate is None:
        return Loopback(hosts)
    why_not = obstacle()
    if why_not:
        raise CommandError(f"--rate cannot be had here: {why_not}; or leave --rate out")
    return Lab(hosts, rate)


def check_rate(rate: str | None) -> None:
    """Refuse what is no rate."""
    if rate is not None:
        try:
            parse_rate(rate)
        except LabError as error:
            raise CommandError(f"--rate: {error}", USAGE) from None
