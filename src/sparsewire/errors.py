"""What can go wrong, as exceptions written for the person who reads them.

Every one derives from `SparsewireError`, so `except sw.SparsewireError` catches all of them.
"""

from __future__ import annotations

from typing import ClassVar


class SparsewireError(RuntimeError):
    """Base of every error that sparsewire raises on purpose."""


class SchemeError(SparsewireError, ValueError):
    """A scheme that cannot be read, or whose parts cannot work together."""


class AttachError(SparsewireError, ValueError):
    """A model that cannot be attached to as it is."""


class StateError(SparsewireError, ValueError):
    """Saved state that does not belong to this scheme, model or rank."""


class ExchangeError(SparsewireError):
    """An exchange that could not finish: a peer is gone, or the deadline has passed.

    `is_agreed`: all ranks raise the error at the same place, so the group lives on. Any other error
    breaks the group, because the other ranks may have seen none.
    """

    is_agreed: ClassVar[bool] = False


class DisagreementError(ExchangeError):
    """Ranks that disagree on scheme, layout or step."""

    is_agreed = True


class CorruptMessageError(ExchangeError):
    """A message that arrived other than it was sent, or that no rank of this scheme would send."""

    is_agreed = True


class NonFiniteError(ExchangeError):
    """NaN or infinity in some rank's gradient."""

    is_agreed = True
