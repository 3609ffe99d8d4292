"""Checks of the saved state of an exchange of updates, before any of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from ..errors import StateError
from ..state import check_numbers
from .updates import Updates


def load_outer(outer: torch.optim.Optimizer, saved: Any) -> None:
    """Load the outer optimizer's state, which it checks before it changes anything."""
    try:
        outer.load_state_dict(deepcopy(saved))  # or training would change the saved tensors
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StateError(f"the saved state of the outer optimizer does not fit: {error}") from error


def check_saved(saved: Any, updates: Updates) -> Mapping[str, Any]:
    """Raise unless this was saved by an exchange of this model's updates."""
    if saved is None:
        raise StateError(
            "the saved state is from an exchange of gradients. Attach with communicate='gradients'"
        )
    weights = updates.weights
    try:
        kept, mean, buffers = saved["weights"], saved["mean"], saved["buffers"]
        tensors = [*kept.values(), *([] if mean is None else [mean])]
        is_fine = (
            type(saved["local_step"]) is int
            and 0 <= saved["local_step"] < saved["every"]
            and ("live" in kept or not (saved["local_step"] or saved["delay"]))
            and ("start" in kept or not saved["delay"])
            and ("shared" in kept or not weights.is_narrow)
            and type(saved["step_ahead"]) is float
            and 0 <= saved["step_ahead"] <= 1
            and saved["delay"] in (0, 1)
            and "outer" in saved
            and all({n: tuple(t.shape) for n, t in h.items()} == weights.shapes for h in tensors)
            and (
                buffers is None
                or (buffers.dtype, tuple(buffers.shape)) == (torch.uint8, (updates.buffer_bytes,))
            )
        )
        for held in tensors if is_fine else ():
            for name, tensor in held.items():
                check_numbers(tensor, f"the saved state of {name}")
    except (AttributeError, KeyError, TypeError) as error:
        raise StateError("the saved state of the updates cannot be read") from error
    if not is_fine:
        raise StateError("the saved state of the updates does not fit this model")
    assert isinstance(saved, Mapping)
    return saved


def is_between(saved: Mapping[str, Any]) -> bool:
    """Return whether the rank had taken local steps since its round began."""
    weights = saved["weights"]
    if saved["local_step"] or "live" not in weights:
        return bool(saved["local_step"])
    start = weights.get("start", {})  # present with delay=1
    return any(
        name not in start or not torch.equal(live.to(start[name].dtype), start[name])
        for name, live in weights["live"].items()
    )
