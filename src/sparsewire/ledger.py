"""The memory of one rank: tensors keyed by parameter name, laid out flat where they are used.

Every step is a transaction. It reads the `before` tensors and writes the `after` tensors; `commit`
lets them change places, and a step that fails simply never commits. That costs two tensors per
remembered field instead of one, and no extra pass over memory.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import StateError
from .kernels.cards import owned
from .memory import LEDGER
from .segments import Segments, Span
from .shards import OWNED

SAMPLE = 1 << 16  # coordinates: 0.4 % off where magnitudes are normally distributed

Remembered = dict[str, dict[str, Tensor]]  # parameter name -> field -> tensor of its shape


@dataclass
class _Page:
    """The memory of the parameters that are exchanged together.

    `spans` say where each field's parameters lie.
    """

    spans: dict[str, tuple[Span, ...]]
    before: dict[str, Tensor]
    after: dict[str, Tensor]

    def turn(self) -> None:
        """Let before and after change places; what is not remembered stays in `after`."""
        for field in self.before:
            self.before[field], self.after[field] = self.after[field], self.before[field]


class Ledger:
    """All that one rank remembers. `fields` are the scheme's; none means nothing is kept.

    A field has a value for every coordinate, or, if it is `OWNED`, for those of each parameter that
    `rank` of `world` owns.
    """

    def __init__(
        self,
        fields: tuple[str, ...],
        shapes: Mapping[str, tuple[int, ...]],
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.fields = fields
        self.shapes = dict(shapes)
        self._owned = {n: (owned(n, math.prod(s), rank, world),) for n, s in shapes.items()}
        self._pages: dict[Hashable, _Page] = {}
        self._homes: dict[tuple[str, str], tuple[_Page, Span]] = {}
        self._loose: Remembered = {}  # loaded, and not yet laid out
        self._open: list[_Page] = []
        self._done: list[_Page] = []

    def open(
        self,
        unit: Hashable,
        segments: Segments,
        dtype: torch.dtype,
        device: torch.device,
        shard: Segments | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The tensors `before` and `after` of one exchange, each with a spare slot at its end.

        `shard` are the coordinates that this rank owns, if there are owners. Parameters are found
        by name wherever they were before: DDP rebuilds its buckets.
        """
        self._done = []
        cuts = dict.fromkeys({*self.fields, LEDGER} - {OWNED}, segments)
        if shard is not None:
            cuts[OWNED] = shard
        page = self._pages.get(unit)
        spans = {field: cut.spans for field, cut in cuts.items()}
        if page is None or page.spans != spans or not self._is_home(page):
            page = self._lay_out(cuts, dtype, device)
            self._pages[unit] = page
        self._open.append(page)
        return page.before, page.after

    def _is_home(self, page: _Page) -> bool:
        """Whether the page's parameters have not moved elsewhere since."""
        return all(
            self._homes[span.name, field][0] is page
            for field in page.before
            for span in page.spans[field]
        )

    def _lay_out(
        self, cuts: Mapping[str, Segments], dtype: torch.dtype, device: torch.device
    ) -> _Page:
        def blank(cut: Segments) -> Tensor:
            return torch.zeros(cut.size + 1, dtype=dtype, device=device)

        page = _Page(
            {field: cut.spans for field, cut in cuts.items()},
            before={field: blank(cut) for field, cut in cuts.items() if field in self.fields},
            after={field: blank(cut) for field, cut in cuts.items()},
        )
        for field, flat in page.before.items():
            for span in page.spans[field]:
                kept = self.recall(span.name).get(field)
                if kept is not None:
                    flat[span.start : span.stop] = kept.view(-1)
                self._homes[span.name, field] = (page, span)
                self._loose.get(span.name, {}).pop(field, None)
        return page

    def commit(self) -> None:
        """The step took place."""
        for page in self._open:
            page.turn()
        self._done, self._open = self._open, []

    def discard(self) -> None:
        """The step did not take place."""
        self._open = []

    def undo(self) -> bool:
        """Take back the last committed step, if the next one has not begun yet."""
        undone, self._done = self._done, []
        for page in undone:
            page.turn()
        return bool(undone)

    def recall(self, name: str) -> dict[str, Tensor]:
        """What is remembered of one parameter, in its shape; empty if nothing yet."""
        kept = dict(self._loose.get(name, {}))
        for field in self.fields:
            if (name, field) in self._homes:
                page, span = self._homes[name, field]
                kept[field] = page.before[field][span.start : span.stop].view(span.shape)
        return kept

    def _shape(self, name: str, field: str) -> tuple[int, ...]:
        return self._owned[name] if field == OWNED else self.shapes[name]

    def scale(self, factors: Mapping[str, float], fields: tuple[str, ...]) -> None:
        """Multiply what is remembered of the named parameters."""
        for name, factor in factors.items():
            for field, tensor in self.recall(name).items():
                if field in fields:
                    tensor.mul_(factor)

    def state(self) -> Remembered:
        """A copy of all that is remembered; parameters without memory yet count as zero."""
        state: Remembered = {}
        for name in self.shapes:
            kept = self.recall(name)
            state[name] = {
                field: kept[field].detach().clone()
                if field in kept
                else torch.zeros(self._shape(name, field))
                for field in self.fields
            }
        return state

    def squares(self) -> dict[str, float]:
        """The sum of squares of what is held back of each parameter, as worker and as owner; empty
        if nothing is kept."""
        fields = [field for field in (LEDGER, OWNED) if field in self.fields]
        if not fields:
            return {}
        rows = [
            (name, torch.linalg.vector_norm(tensor, dtype=torch.float64))
            for name in self.shapes
            for field, tensor in self.recall(name).items()
            if field in fields
        ]
        squares = dict.fromkeys(self.shapes, 0.0)
        if rows:  # one wait for the device, whatever the number of parameters
            norms = torch.stack([norm for _, norm in rows]).tolist()
            for (name, _), norm in zip(rows, norms, strict=True):
                squares[name] += norm**2
        return squares

    def estimated_norm(self) -> float:
        """The norm of what is held back, estimated from about `SAMPLE` coordinates evenly spaced.

        What is held back has no outliers, since these are sent, so a sample serves well.
        """
        flats = [
            page.before[field]
            for page in self._pages.values()
            if self._is_home(page)
            for field in (LEDGER, OWNED)
            if field in page.before
        ]
        stride = max(1, sum(flat.numel() for flat in flats) // SAMPLE) | 1  # odd: meets all columns
        norms = [torch.linalg.vector_norm(flat[::stride], dtype=torch.float64) for flat in flats]
        squares = torch.stack(norms).square().sum().item() if norms else 0.0
        return math.sqrt(stride * squares)

    def check(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Refuse state that does not belong to these parameters, saying which do not fit."""
        if not isinstance(state, Mapping) or not all(
            isinstance(kept, Mapping) and all(isinstance(t, Tensor) for t in kept.values())
            for kept in state.values()
        ):
            raise StateError("the saved memory is not what state_dict() returns")
        missing = sorted(self.shapes.keys() - state.keys())
        foreign = sorted(state.keys() - self.shapes.keys())
        if missing:
            raise StateError(
                f"the saved state lacks {_some(missing)}: was it saved for this model?"
            )
        if foreign:
            raise StateError(f"the saved state knows {_some(foreign)}, which this model has not")
        for name in self.shapes:
            if OWNED in state[name] and OWNED not in self.fields:
                raise StateError(
                    f"the saved state of {name} holds what an owner keeps back, and this scheme "
                    f"has no owners: attach with collective=Sharded(), or it would be lost"
                )
            # owners that there were not before begin with nothing
            if {*state[name], OWNED} != {*self.fields, OWNED}:
                raise StateError(
                    f"the saved state of {name} holds {sorted(state[name])}, and this memory keeps "
                    f"{sorted(self.fields)}: attach with the memory= that it was saved with, or "
                    f"begin with an empty one"
                )
            for field, tensor in state[name].items():
                shape = self._shape(name, field)
                if tuple(tensor.shape) != shape:
                    has = ", and this rank owns" if field == OWNED else ", and the parameter has"
                    raise StateError(
                        f"the saved {field} of {name} has shape {tuple(tensor.shape)}{has} {shape}"
                    )
                if not tensor.isfinite().all():
                    raise StateError(f"the saved {field} of {name} holds NaN or infinity")

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over saved state, checked before anything changes."""
        self.check(state)
        self._pages.clear()
        self._homes.clear()
        self._open, self._done = [], []
        self._loose = {
            name: {field: tensor.detach().clone() for field, tensor in kept.items()}
            for name, kept in state.items()
        }


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
