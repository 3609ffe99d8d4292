"""What a collective is, and the exchange under way that it works on.

A collective does no input or output: its plan's `run` is a routine that yields requests and is sent
the answers.
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
    """What a collective needs to know of a scheme: who selects, and how entries are written."""

    selector: Selector
    indices: IndexCodec
    values: ValueCodec


@dataclass
class Transfer:
    """One rank's exchange under way: where a collective reads from and writes to.

    What it finds wrong, in `corruption` and `non_finite`, stays on the gradient's device: the ranks
    compare it when the step is over, and the mean is written without waiting for that.

    Arguments:
        context: which exchange this is; the keys of all checksums follow from it.
        key: of random choices, with this rank's number.
        world_size: how many ranks exchange.
        gradient: receives the mean.
        state: what the scheme's parts keep.
        unused: parameters of which nothing may be sent.
        corruption: the first corrupt message, as a `corruption_code`.
        non_finite: the first parameter in which an owner found NaN or infinity.
        returned: what was put back into the residual of the values that were selected.
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
        """1/W, to multiply by: dividing a tensor by W gives other bits on a GPU than on a CPU."""
        return 1 / self.world_size

    def random_key(self, rank: int) -> RandomKey:
        """Return what the random choices of another rank depend on."""
        return RandomKey(self.key.seed, self.key.step, rank)

    def encode(self, layout: MessageLayout, entries: Entries) -> tuple[Tensor, Entries]:
        """Return this rank's values as bytes, and its entries as others will read them.

        What the codec changes is put back into the residual.
        """
        indices, _ = entries
        key = self.key.key(shared=False)
        data, read, errors = layout.encode_values(entries, key, self.work)
        if errors is not None:
            self.put_back(indices, errors, layout.segments)
        return data, (indices, read)

    def put_back(self, indices: Tensor, errors: Tensor, segments: Segments) -> None:
        """Add to the residual what is not sent after all."""
        residual = self.state.after[RESIDUAL]
        kernels.on(errors.device).put_back(residual, indices, errors, segments, self.work)
        self.returned = errors

    def note(self, corruption: Tensor) -> None:
        """Keep the first corruption."""
        self.corruption = torch.where(self.corruption == FINE, corruption, self.corruption)


class CollectivePlan(ABC):
    """A collective's protocol for one gradient: the layouts of its messages, and what it does.

    `traffic`: the bytes that each rank sends, as many as it receives.
    `message_bytes`: the bytes of its messages, by what they are called, where they differ from one
    message with all that a rank sends.
    """

    traffic: int
    message_bytes: Mapping[str, int]

    @abstractmethod
    def run(self, entries: Entries, transfer: Transfer) -> Routine[None]:
        """Exchange this rank's entries, and write the mean into `transfer.gradient`."""

    def owned(self, rank: int) -> Segments | None:
        """Return the coordinates that a rank owns, if there are shard owners."""
        return None


class Collective(Part, ABC):
    """Carries messages between ranks.

    `adds`: values are added on the way, so ranks must share coordinates.
    `fields`: what a rank keeps for it from step to step. If they are 'owned', owners select anew.
    """

    adds: ClassVar[bool]
    fields: ClassVar[tuple[StateField, ...]] = ()

    @abstractmethod
    def plan(
        self, coding: Coding, segments: Segments, world_size: int, dtype: torch.dtype
    ) -> CollectivePlan:
        """Return the protocol among `world_size` ranks for a gradient of `dtype`."""

    def owner_selector(self, selector: Selector) -> Selector | None:
        """Return what shard owners select by where ranks select by `selector`; None without
        owners."""
        return None

    def why(self, coding: Coding) -> str:
        """Return why this collective is the one to use, or what it does, for `explain`."""
        return ""
