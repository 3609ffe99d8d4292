"""The state of one rank: tensors by parameter name, laid out flat for each exchange.

The parts of a scheme declare their tensors as `StateField`s, which is all that the store knows of
them. Every step is a transaction. It reads the `before` tensors and writes the `after` tensors.
`commit` swaps the two, and a step that fails never commits. That takes two tensors for each field
instead of one, and no extra pass over memory.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from .errors import StateError
from .segments import ParamSlice, Segments
from .shards import owned, owners

RESIDUAL = "residual"
OWNED = "owned"  # the residual of a shard owner
_OWNED_PREFIX = "owned."
NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SAMPLE = 1 << 16  # coordinates: an error of 0.4 % for normally distributed values

Saved = dict[str, dict[str, Tensor]]  # parameter name -> key of a field -> tensor


@dataclass(frozen=True)
class StateField:
    """A tensor that a part keeps from step to step, with one number for every coordinate.

    Arguments:
        key: The name of the field in checkpoints and checksums. It must never change, even if the
            attribute or class that uses it is renamed.
        extent: `'coordinate'` for every coordinate of a parameter, or `'owned'` for those that this
            rank owns as a shard owner.
        loss_scale_power: How the field follows the scale s of the loss: 1 for sums of gradients, 2
            for sums of their squares, 0 for what does not depend on s.
        follows_lr: True if the field holds gradients that are still to be applied, so that a new
            learning rate γ multiplies them by γ_old / γ.
        persistent: If True, the field is saved in checkpoints. Otherwise it is zero after a
            restart.
        resize: What the values of W ranks become if W' ranks resume. `'mean'`: all ranks get their
            mean, so that the mean over ranks stays the same, as for residuals. `'sum'`: all ranks
            get an equal part, 1/W', of their sum, which stays the same. `'reset'`: zero. An owned
            coordinate has one value, which goes to its new owner unless it is reset.
    """

    key: str
    extent: Literal["coordinate", "owned"] = "coordinate"
    loss_scale_power: int = 1
    follows_lr: bool = False
    persistent: bool = True
    resize: Literal["mean", "sum", "reset"] = "mean"

    @property
    def for_owner(self) -> StateField:
        """The same field for the coordinates that a shard owner owns."""
        return replace(self, key=_OWNED_PREFIX + self.key, extent="owned")


@dataclass(frozen=True)
class StepState:
    """The state of one exchange: flat tensors by the key of their field.

    Each tensor has a spare slot at its end.

    Arguments:
        before: The fields after the last step. A field that is not kept is missing.
        after: The fields that this step writes.
    """

    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]

    @property
    def for_owner(self) -> StepState:
        """The fields of a shard owner's selector, by the keys that the selector uses."""
        return StepState(_owner_part(self.before), _owner_part(self.after))


def _owner_part(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        key.removeprefix(_OWNED_PREFIX): tensor
        for key, tensor in tensors.items()
        if key.startswith(_OWNED_PREFIX)
    }


@dataclass
class _Column:
    """One field of the parameters that are exchanged together.

    `before` is None if the field is not kept. `after` is None until a step needs it.
    """

    key: str
    params: tuple[ParamSlice, ...]
    before: Tensor | None
    after: Tensor | None

    def swap(self) -> None:
        if self.before is not None:
            self.before, self.after = self.after, self.before


@dataclass
class StateStore:
    """The state of one rank.

    Arguments:
        fields: The fields that the parts of the scheme declare. Without any, nothing is kept.
        shapes: The shapes of the parameters by name.
        rank, world_size: This rank and the number of ranks that exchange, for 'owned' fields.
    """

    fields: Sequence[StateField]
    shapes: Mapping[str, tuple[int, ...]]
    rank: int = 0
    world_size: int = 1
    _columns: dict[tuple[Hashable, str], _Column] = field(default_factory=dict)
    _homes: dict[tuple[str, str], tuple[_Column, ParamSlice]] = field(default_factory=dict)
    _loaded: Saved = field(default_factory=dict)  # not laid out yet
    _open: list[_Column] = field(default_factory=list)
    _committed: list[_Column] = field(default_factory=list)

    def open(
        self,
        unit: Hashable,
        layout: Mapping[str, Segments],
        dtype: torch.dtype,
        device: torch.device,
    ) -> StepState:
        """Return the tensors of one exchange.

        `layout` maps the key of each field in use to the layout of its flat tensor. Other fields
        keep their values. Parameters are looked up by name, because DDP rebuilds its buckets.
        """
        self._committed = []
        before, after = {}, {}
        for key, segments in layout.items():
            column = self._column(unit, key, segments, dtype, device)
            if column.after is None:
                column.after = torch.zeros(segments.size + 1, dtype=dtype, device=device)
            self._open.append(column)
            after[key] = column.after
            if column.before is not None:
                before[key] = column.before
        return StepState(before, after)

    def flat(
        self, unit: Hashable, key: str, segments: Segments, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """Return a field after the last step, laid out as in `open`; None if it is not kept.

        It is the store's own tensor: only read it, and only until the next step ends.
        """
        before = self._column(unit, key, segments, dtype, device).before
        return None if before is None else before[: segments.size]

    def _column(
        self, unit: Hashable, key: str, segments: Segments, dtype: torch.dtype, device: torch.device
    ) -> _Column:
        column = self._columns.get((unit, key))
        if column is None or column.params != segments.params or not self._is_home(column):
            is_kept = any(field.key == key for field in self.fields)
            column = self._lay_out(key, segments, dtype, device, is_kept)
            self._columns[unit, key] = column
        return column

    def _is_home(self, column: _Column) -> bool:
        """Return whether all parameters of the column are still in it."""
        return column.before is None or all(
            self._homes[param.name, column.key][0] is column for param in column.params
        )

    def _lay_out(
        self, key: str, segments: Segments, dtype: torch.dtype, device: torch.device, is_kept: bool
    ) -> _Column:
        if not is_kept:
            return _Column(key, segments.params, None, None)
        before = torch.zeros(segments.size + 1, dtype=dtype, device=device)
        column = _Column(key, segments.params, before, None)
        for param in segments.params:
            held = self.get(param.name).get(key)
            if held is not None:
                before[param.start : param.stop] = held.reshape(-1)
            self._homes[param.name, key] = (column, param)
            self._loaded.get(param.name, {}).pop(key, None)
        return column

    def commit(self) -> None:
        """End the step and keep what it wrote."""
        for column in self._open:
            column.swap()
        self._committed, self._open = self._open, []

    def commit_only(self, key: str) -> None:
        """End the step and keep what it wrote to one field only."""
        self._open = [column for column in self._open if column.key == key]
        self.commit()

    def discard(self) -> None:
        """Drop what the open step wrote."""
        self._open = []

    def undo(self) -> bool:
        """Undo the last committed step, if the next one has not begun. Return whether it did."""
        undone, self._committed = self._committed, []
        for column in undone:
            column.swap()
        return bool(undone)

    def get(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one parameter by key; empty if there are none yet."""
        held = dict(self._loaded.get(name, {}))
        for each in self.fields:
            if (name, each.key) in self._homes:
                column, param = self._homes[name, each.key]
                assert column.before is not None
                held[each.key] = column.before[param.start : param.stop].view(param.shape)
        return held

    def fork(self) -> StateStore:
        """Return an independent store with the same state, without copying it.

        The next step of the new store leaves the tensors of this one unchanged.
        """
        columns = {place: replace(column, after=None) for place, column in self._columns.items()}
        forked = {id(self._columns[place]): column for place, column in columns.items()}
        homes = {
            place: (forked[id(column)], param)
            for place, (column, param) in self._homes.items()
            if id(column) in forked
        }
        loaded = {name: dict(held) for name, held in self._loaded.items()}
        return StateStore(
            self.fields, self.shapes, self.rank, self.world_size, columns, homes, loaded
        )

    def release(self) -> None:
        """Free the tensors that the next step would write to. It allocates new ones."""
        self._committed = []
        for column in self._columns.values():
            column.after = None

    def follow_lr(self, factors: Mapping[str, float]) -> None:
        """Multiply the fields that follow the learning rate, for the given parameters."""
        self._scale(factors, {field.key: 1 for field in self.fields if field.follows_lr})

    def follow_loss_scale(self, factor: float) -> None:
        """Rescale all fields after the loss scale was multiplied by `factor`."""
        powers = {field.key: field.loss_scale_power for field in self.fields}
        self._scale(dict.fromkeys(self.shapes, factor), powers)

    def _scale(self, factors: Mapping[str, float], powers: Mapping[str, int]) -> None:
        for name, factor in factors.items():
            for key, tensor in self.get(name).items():
                if powers.get(key):
                    tensor.mul_(factor ** powers[key])
        for column in self._committed:  # also the tensors that `undo` would restore
            for param in column.params if column.before is not None else ():
                if param.name in factors and powers.get(column.key) and column.after is not None:
                    part = column.after[param.start : param.stop]
                    part.mul_(factors[param.name] ** powers[column.key])

    def state_dict(self) -> Saved:
        """Return a copy of all persistent fields, with zeros for tensors that do not exist yet."""
        saved: Saved = {}
        for name in self.shapes:
            held = self.get(name)
            saved[name] = {
                each.key: held[each.key].detach().clone()
                if each.key in held
                else torch.zeros(self._shape(name, each))
                for each in self.fields
                if each.persistent
            }
        return saved

    def _shape(self, name: str, each: StateField) -> tuple[int, ...]:
        shape = self.shapes[name]
        if each.extent == "coordinate":
            return shape
        return (owned(name, math.prod(shape), self.rank, self.world_size),)

    def squared_norms(self) -> dict[str, float]:
        """Return the sum of squares of each parameter's residual; empty if none is kept.

        The residual of a shard owner is included.
        """
        keys = [field.key for field in self.fields if field.key in (RESIDUAL, OWNED)]
        if not keys:
            return {}
        rows = [
            (name, torch.linalg.vector_norm(tensor, dtype=torch.float64))
            for name in self.shapes
            for key, tensor in self.get(name).items()
            if key in keys
        ]
        squares = dict.fromkeys(self.shapes, 0.0)
        if rows:  # waits for the device once, for any number of parameters
            norms = torch.stack([norm for _, norm in rows]).tolist()
            for (name, _), norm in zip(rows, norms, strict=True):
                squares[name] += norm**2
        return squares

    def estimated_norm(self) -> float:
        """Estimate the norm of the residual from about `SAMPLE` evenly spaced coordinates.

        The largest values are sent, so the residual has no outliers and a sample is accurate.
        """
        flats = [
            column.before
            for column in self._columns.values()
            if column.key in (RESIDUAL, OWNED)
            and column.before is not None
            and self._is_home(column)
        ]
        stride = max(1, sum(flat.numel() for flat in flats) // SAMPLE) | 1  # odd: hits all columns
        norms = [torch.linalg.vector_norm(flat[::stride], dtype=torch.float64) for flat in flats]
        squares = torch.stack(norms).square().sum().item() if norms else 0.0
        return math.sqrt(stride * squares)

    def check(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raise unless the saved state fits these parameters and fields."""
        if not isinstance(saved, Mapping) or not all(
            isinstance(held, Mapping) and all(isinstance(t, Tensor) for t in held.values())
            for held in saved.values()
        ):
            raise StateError(
                "the saved memory is not a mapping of tensors by parameter. Pass what "
                "state_dict() returned, unchanged"
            )
        missing = sorted(self.shapes.keys() - saved.keys())
        foreign = sorted(map(str, saved.keys() - self.shapes.keys()))
        if missing:
            raise StateError(
                f"the saved state lacks {_some(missing)}: was it saved for this model?"
            )
        if foreign:
            raise StateError(
                f"the saved state contains {_some(foreign)}, which this model does not have"
            )
        fields = {field.key: field for field in self.fields if field.persistent}
        optional = {key for key, field in fields.items() if field.extent == "owned"}
        for name in self.shapes:
            keys = saved[name].keys()
            if OWNED in keys and OWNED not in fields:
                raise StateError(
                    f"the saved state of {name} holds a shard owner's residual, which this scheme "
                    f"would lose, since it has no owners: attach with collective=Sharded()"
                )
            # an owner without saved state begins with zeros
            if {*keys, *optional} != set(fields):
                raise StateError(
                    f"the saved state of {name} holds {sorted(map(str, keys))}, and this memory "
                    f"keeps {sorted(fields)}: attach with the selector and the memory= that it was "
                    f"saved with, or start with an empty residual"
                )
            for key, tensor in saved[name].items():
                shape = self._shape(name, fields[key])
                if tuple(tensor.shape) != shape:
                    has = "this rank owns" if key in optional else "the parameter has"
                    raise StateError(
                        f"the saved {key} of {name} has shape {tuple(tensor.shape)}, and {has} "
                        f"{shape}"
                    )
                check_numbers(tensor, f"the saved {key} of {name}")

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load a copy of saved state. It is checked before anything changes."""
        self.check(saved)
        self.adopt(
            {
                name: {key: tensor.detach().clone() for key, tensor in held.items()}
                for name, held in saved.items()
            }
        )

    def adopt(self, held: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace the state by these tensors, without copying them."""
        self._columns.clear()
        self._homes.clear()
        self._open, self._committed = [], []
        self._loaded = {name: dict(tensors) for name, tensors in held.items()}


def check_numbers(tensor: Tensor, what: str) -> None:
    """Raise unless a tensor is strided, of floating-point type and finite."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in NUMBERS:
        kind = "on the meta device" if tensor.is_meta else f"{tensor.dtype}, {tensor.layout}"
        raise StateError(
            f"{what} is a tensor of another kind ({kind}) than the dense floating-point ones that "
            f"state_dict() returns: pass what it returned, unchanged"
        )
    if not tensor.isfinite().all():
        raise StateError(f"{what} holds NaN or infinity")


def resize(
    saved: Sequence[Mapping[str, Mapping[str, Tensor]]],
    fields: Sequence[StateField],
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    world_size: int,
) -> Saved:
    """Return the state of rank `rank` of `world_size`, from the states of all ranks in order.

    Every field is merged by its `resize`. If the number of ranks is the same, nothing changes.
    No residual is lost: the mean over ranks, plus the residuals of owners, stays the same up to
    rounding. Merged tensors are on the CPU.
    """
    if not saved or not 0 <= rank < world_size:
        raise StateError(
            f"the states of {len(saved)} ranks cannot be resized for rank {rank} of {world_size}"
        )
    for number, held in enumerate(saved):
        StateStore(fields, shapes, number, len(saved)).check(held)
    if world_size == len(saved):
        return {
            name: {key: tensor.clone() for key, tensor in held.items()}
            for name, held in saved[rank].items()
        }
    resized: Saved = {name: {} for name in shapes}
    for name, shape in shapes.items():
        for each in fields:
            parts = [held[name][each.key].cpu() for held in saved if each.key in held[name]]
            if not parts:  # not persistent, or there were no owners
                continue
            if each.extent == "owned":
                length = math.prod(shape)
                whole = parts[0].new_zeros(length)
                before, after = (owners(name, length, size) for size in (len(saved), world_size))
                for number, held in enumerate(saved):
                    if each.key in held[name]:
                        whole[before == number] = held[name][each.key].cpu()
                merged = whole[after == rank]
            else:
                total = sum(parts, torch.zeros(shape, dtype=torch.float64))
                merged = total / (world_size if each.resize == "sum" else len(saved))
            merged = merged.to(parts[0].dtype)
            resized[name][each.key] = merged.zero_() if each.resize == "reset" else merged
    return resized


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
