"""Rescale the residual when the learning rate or the loss scale changes.

Both change the scale of gradients, so the residual is multiplied to match. An exchange of updates
only watches a GradScaler.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import StateError
from ..state import StateStore


class Scaling:
    """Follows an optimizer's learning rates and a GradScaler's scale, if there are any."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.scaler = scaler
        self._optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._rates: dict[str, float] = {}
        self._scale: float | None = None

    def follow(self, store: StateStore) -> None:
        """Rescale the state, before a step adds a gradient to it."""
        if self._optimizer is not None:
            store.follow_lr(self._rate_changes(self._optimizer))
        if self.scaler is not None:
            scale = float(self.scaler.get_scale())
            if self._scale is not None and scale != self._scale:
                store.follow_loss_scale(scale / self._scale)
            self._scale = scale

    def _rate_changes(self, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        """Return old rate / new rate for parameters whose rate changed. Rates of 0 are ignored."""
        changes = {}
        for group in optimizer.param_groups:
            rate = float(group["lr"])
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is None or rate == 0:
                    continue
                old = self._rates.get(name, rate)
                if old != rate:
                    changes[name] = old / rate
                self._rates[name] = rate
        return changes

    def state(self) -> dict[str, Any]:
        """Return the learning rates and the loss scale of the residual."""
        return {"rates": dict(self._rates), "scale": self._scale}

    @staticmethod
    def check(state: Any) -> None:
        """Raise unless this can be a result of `state`."""
        fine = (
            isinstance(state, Mapping)
            and isinstance(state.get("rates"), Mapping)
            and all(_is_unit(rate) for rate in state["rates"].values())
            and "scale" in state
            and (state["scale"] is None or _is_unit(state["scale"]))
        )
        if not fine:
            raise StateError(
                "the saved state's learning rates or loss scale are not positive, finite numbers. "
                "Pass what state_dict() returned, unchanged"
            )

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state`."""
        self._rates = dict(state["rates"])
        self._scale = state["scale"]


def _is_unit(value: Any) -> bool:
    """Return whether a residual can have this scale and be rescaled to another one."""
    return isinstance(value, float) and sys.float_info.min <= value < math.inf


class WatchedScaler:
    """Watches whether a GradScaler's `step` calls the optimizer's `step`."""

    def __init__(self, scaler: torch.amp.GradScaler, tell: Any) -> None:
        self._scaler, self._tell = scaler, tell
        self._plain = scaler.step  # another model may watch it as well
        self._watched = self._step
        scaler.step = self._watched  # type: ignore[method-assign]

    def _step(self, optimizer: torch.optim.Optimizer, *arguments: Any, **options: Any) -> Any:
        stepped = False

        def note(*_: object) -> None:
            nonlocal stepped
            stepped = True

        hook = optimizer.register_step_post_hook(note)
        try:
            result = self._plain(optimizer, *arguments, **options)
        finally:
            hook.remove()
        if self._tell is not None:
            self._tell(optimizer, stepped)
        return result

    def remove(self) -> None:
        self._tell = None
        if self._scaler.step is self._watched:
            self._scaler.step = self._plain  # type: ignore[method-assign]
