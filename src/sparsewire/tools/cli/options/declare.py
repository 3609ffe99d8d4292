"""Declare a dataclass field as a command-line option; `parse` reads the declarations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

MODELS = "{mnist,resnet18,transformer,MODULE:FUNCTION}"


@dataclass(frozen=True)
class Limit:
    """The values that an option allows; `words` completes the sentence "it must be …"."""

    words: str
    holds: Callable[[Any], bool]


def at_least(least: float) -> Limit:
    """Return the limit to numbers of at least `least`."""
    return Limit(f"at least {least}", lambda value: value >= least)


def between(low: float, high: float) -> Limit:
    """Return the limit to numbers from `low` to `high`, both included."""
    return Limit(f"in {low:,} to {high:,}", lambda value: low <= value <= high)


POSITIVE = Limit("a positive number", lambda value: 0 < value < math.inf)
SECONDS = Limit("in seconds, more than 0, less than a day", lambda value: 0 < value < 86400)


@dataclass(frozen=True)
class Option:
    """What `--help` and the parser need to know besides a field's name, type and default.

    Args:
        help: one or two sentences.
        value: stands for the value in the help.
        usual: what the help says about the default; the default itself if None.
        limit: which values are allowed; checked for each of several.
        also: other spellings.
        repeated: the option is given once for each value.
        may_be_empty: the option may be given with no value at all.
        positional: it has no flag.
    """

    help: str
    value: str | None = None
    usual: str | None = None
    limit: Limit | None = None
    also: tuple[str, ...] = ()
    repeated: bool = False
    may_be_empty: bool = False
    positional: bool = False


def option(default: T, help: str, value: str | None = None, **more: Any) -> T:
    """Declare a field that is a flag; the arguments are those of `Option`."""
    found: T = field(default=default, metadata={"option": Option(help, value, **more)})
    return found


def argument(help: str, value: str, default: Any = MISSING) -> Any:
    """Declare a field that is typed without a flag; without a default it must be given."""
    return field(default=default, metadata={"option": Option(help, value, positional=True)})


@dataclass(frozen=True, kw_only=True)
class Output:
    """Options of every command that takes long."""

    json: bool = option(False, "Print the result as JSON on standard output.")
    quiet: bool = option(False, "Show no progress.")
    debug: bool = option(False, "Show tracebacks and what the workers print.")
