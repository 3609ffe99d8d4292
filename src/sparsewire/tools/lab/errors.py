"""Errors of the lab."""

from __future__ import annotations

from sparsewire.errors import SparsewireError


class LabError(SparsewireError):
    """A lab that cannot be built, changed or measured; it says which command failed, and why."""
