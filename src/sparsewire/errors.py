"""The errors that sparsewire raises.

Each of them derives from `SparsewireError`, so `except sw.SparsewireError` catches all of them.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AttachError",
    "CorruptMessageError",
    "DisagreementError",
    "ExchangeError",
    "NonFiniteError",
    "SchemeError",
    "SparsewireError",
    "StateError",
]


class SparsewireError(RuntimeError):
    """Base class of all errors that sparsewire raises on purpose.

    >>> import sparsewire as sw
    >>> try:
    ...     sw.TopK(50)
    ... except sw.SparsewireError as error:
    ...     print(type(error).__name__)
    SchemeError
    """


class SchemeError(SparsewireError, ValueError):
    """A scheme cannot be parsed, or its parts cannot work together. Also a `ValueError`."""


class AttachError(SparsewireError, ValueError):
    """A model cannot be attached to as it is. Also a `ValueError`."""


class StateError(SparsewireError, ValueError):
    """Saved state does not belong to this scheme, model or rank. Also a `ValueError`."""


class ExchangeError(SparsewireError):
    """An exchange could not finish: another rank is gone, or the deadline has passed.

    Attributes:
        is_agreed: True if all ranks raise this error at the same place, so that the group stays
            usable. Other errors break the group, because some ranks may not have noticed.
    """

    is_agreed: ClassVar[bool] = False


class DisagreementError(ExchangeError):
    """Ranks disagree on the scheme, the layout or the step. All ranks raise it."""

    is_agreed = True


class CorruptMessageError(ExchangeError):
    """A message arrived corrupt, or no rank with this scheme would send it. All ranks raise it."""

    is_agreed = True


class NonFiniteError(ExchangeError):
    """A rank's gradient or update has NaN or infinity. All ranks raise it."""

    is_agreed = True
