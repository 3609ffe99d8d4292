"""The base classes of collectives.

A collective does no input or output. The `run` of its plan is a generator that yields requests and
receives the answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..codecs import IndexCodec, ValueCodec
from ..counters import Counters
from ..layout import Entries, MessageLayout
from ..message import FINE, Context
from ..notation import Part
from ..randomness import RandomKey
from ..requests import Routine
from ..segments import ParamSlice, Segments
from ..selectors import Selector
from ..state import RESIDUAL, StateField, StepState
from ..workspace import Workspace


@dataclass(frozen=True)
class Coding:
    """The parts of a scheme that a collective needs.

    Arguments:
        selector: Which coordinates are sent.
        indices: How they are encoded.
        values: How their values are encoded.
    """

    selector: Selector
    indices: IndexCodec
    values: ValueCodec


@dataclass
class Transfer:
    """One rank's part in an exchange that is under way.

    `corruption` and `non_finite` stay on the gradient's device. The ranks compare them at the end
    of the step, and the mean is written without waiting for that.

    Arguments:
        context: Which exchange this is; checksums are keyed by it.
        key: The source of random choices, with this rank's number.
        world_size: The number of ranks that exchange.
        gradient: Receives the mean.
        state: The state of the scheme's parts before and after the step.
        unused: The parameters that must not be sent.
        counters: This rank's running totals.
        work: This rank's workspace.
        corruption: The first corrupt message, as a `corruption_code`.
        returned: The part of the selected values that was put back into the residual.

    Attributes:
        non_finite: The first parameter in which a shard owner found NaN or infinity.
    """

    context: Context
    key: RandomKey
    world_size: int
    gradient: Tensor
    state: StepState
    unused: Sequence[ParamSlice]
    counters: Counters
    work: Workspace
    corruption: Tensor
    non_finite: Tensor = field(init=False)
    returned: Tensor | None = None

    def __post_init__(self) -> None:
        self.non_finite = torch.full((), FINE, device=self.gradient.device)

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.key.rank

    @property
    def share(self) -> float:
        """1/W, to multiply by. Dividing a tensor by W gives other bits on a GPU than on a CPU."""
        return 1 / self.world_size

    def random_key(self, rank: int) -> RandomKey:
        """Return the source of random choices of another rank."""
        return RandomKey(self.key.seed, self.key.step, rank)

    def encode(self, layout: MessageLayout, entries: Entries) -> tuple[Tensor, Entries]:
        """Return this rank's values as bytes, and its entries as others will read them.

        The error of the codec is put back into the residual.
        """
        indices, _ = entries
        key = self.key.key(shared=False)
        data, read, errors = layout.encode_values(entries, key, self.work)
        if errors is not None:
            self.put_back(indices, errors, layout.segments)
        return data, (indices, read)

    def put_back(self, indices: Tensor, errors: Tensor, segments: Segments) -> None:
        """Add errors to the residual."""
        residual = self.state.after[RESIDUAL]
        kernels.on(errors.device).put_back(residual, indices, errors, segments, self.work)
        self.returned = errors

    def note(self, corruption: Tensor) -> None:
        """Note a corrupt message, unless one is noted already."""
        self.corruption = torch.where(self.corruption == FINE, corruption, self.corruption)


class CollectivePlan(ABC):
    """Base class of a collective's protocol for one gradient.

    Attributes:
        traffic: The bytes that each rank sends; it receives as many.
        message_bytes: The size of each kind of message, by name, if a rank sends more than one.
    """

    traffic: int
    message_bytes: Mapping[str, int]

    @abstractmethod
    def run(self, entries: Entries, transfer: Transfer) -> Routine[None]:
        """Exchange this rank's entries, and write the mean into `transfer.gradient`.

        Arguments:
            entries: The selected indices, and the values.
            transfer: The exchange under way.
        """

    def owned(self, rank: int) -> Segments | None:
        """Return the coordinates that a rank owns; None without shard owners."""
        return None


class Collective(Part, ABC):
    """Base class of collectives, which carry messages to the other ranks.

    Attributes:
        adds: True if values are summed in transit, so that all ranks must send the same
            coordinates.
        fields: The state that a rank keeps for the collective from step to step, such as the
            residual of a shard owner.
    """

    adds: ClassVar[bool]
    fields: ClassVar[tuple[StateField, ...]] = ()

    @abstractmethod
    def plan(
        self, coding: Coding, segments: Segments, world_size: int, dtype: torch.dtype
    ) -> CollectivePlan:
        """Return the protocol of `world_size` ranks for one gradient.

        Arguments:
            coding: The parts of the scheme that matter here.
            segments: The segments of the gradient.
            world_size: The number of ranks that exchange.
            dtype: The type of sums.
        """

    def owner_selector(self, selector: Selector) -> Selector | None:
        """Return the selector that shard owners use; None without owners.

        Arguments:
            selector: The selector of the ranks.
        """
        return None

    def why(self, coding: Coding) -> str:
        """Return why this collective is used, or what it does, as a text for `explain`."""
        return ""
