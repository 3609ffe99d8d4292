"""What a collective is, and what it needs from the exchange that it works for.

A collective does no input or output: it is a routine that yields requests and is sent the answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from ..message import Context
from ..meter import Meter
from ..notation import Part
from ..requests import Routine
from ..workspace import Workspace
from .sums import Total


class Desk(Protocol):
    """What a collective needs from the exchange it works for."""

    share: float
    """1/W, to multiply by: dividing a tensor by W gives other bits on a GPU than on a CPU."""
    context: Context
    rank: int
    world: int
    work: Workspace
    meter: Meter

    def write(self, indices: Tensor, values: Tensor) -> Tensor:
        """One rank's message."""

    def read(self, messages: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """All ranks' indices and values again, in rank order; damage is remembered."""

    def narrow(self, indices: Tensor, values: Tensor) -> Tensor:
        """One rank's values as the numbers that travel."""

    def check(self, total: Total) -> Tensor:
        """The sum; damage is remembered."""

    def apply(self, entries: Sequence[tuple[Tensor, Tensor]], share: float) -> None:
        """Write the sum of all entries, each times `share`, into the gradient."""


class Sizes(Protocol):
    """What the traffic of an exchange depends on."""

    @property
    def message_bytes(self) -> int:
        """Bytes of a message with all that a rank sends."""

    @property
    def value_count(self) -> int:
        """Values in it."""

    @property
    def value_width(self) -> int:
        """Bytes of a value that travels to be added up."""

    @property
    def sum_width(self) -> int:
        """Bytes of a sum of values."""

    def push_bytes(self, world: int) -> int:
        """Bytes of one rank's message to one owner."""

    def pull_bytes(self, world: int) -> int:
        """Bytes of one owner's message to all."""


class Collective(Part, ABC):
    """Carries messages. `adds`: messages are added on the way, so ranks must share coordinates."""

    adds: ClassVar[bool]
    fields: ClassVar[tuple[str, ...]] = ()
    """What a rank remembers as the owner of some coordinates."""

    @abstractmethod
    def meet(self, indices: Tensor, values: Tensor, desk: Desk) -> Routine[None]:
        """Exchange this rank's entries and hand the mean to `desk.add`."""

    @abstractmethod
    def traffic(self, sizes: Sizes, world: int) -> int:
        """Bytes each rank sends, as many as it receives."""
