"""The place where workers run: this machine's loopback, or a lab with links of a given rate."""

from __future__ import annotations

from sparsewire.report import plural

from ..lab import Lab, LabError, Loopback, cores, obstacle, parse_rate
from .errors import USAGE, CommandError

Site = Lab | Loopback
LARGEST_GROUP = 64
_WORKERS_PER_CORE = 16


def choose(hosts: int, rate: int | None, loopback: bool) -> Site:
    """Return loopback or a lab with links of a rate, unshaped if None; the caller enters it."""
    return Loopback(hosts) if loopback else Lab(hosts, None if rate is None else f"{rate}bit")


def read_rate(text: str, flag: str = "--rate") -> int | None:
    """Return a rate in bits per second, None for unshaped links."""
    try:
        return None if text.lower() == "none" else parse_rate(text)
    except LabError as error:
        raise CommandError(f"{flag}: {error}", USAGE) from None


def check_lab(instead: str) -> None:
    """Raise an error that names an alternative if no lab can be built here."""
    why_not = obstacle()
    if why_not:
        raise CommandError(f"{why_not}; or {instead}")


def check_hosts(number: int, flag: str) -> None:
    """Raise an error for more processes than the machine can run."""
    most = min(LARGEST_GROUP, _WORKERS_PER_CORE * cores())
    if number > LARGEST_GROUP:
        raise CommandError(
            f"{flag} {number} is too many for one machine: at most {LARGEST_GROUP}", USAGE
        )
    if number > most:
        raise CommandError(
            f"{flag} {number} is too many for {plural(cores(), 'core')}: at most {most}", USAGE
        )
