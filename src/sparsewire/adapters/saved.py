"""What a rank saves to go on later as if it had never stopped, and what may be loaded again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import StateError
from ..groups import Group
from ..ledger import Ledger
from ..scheme import AnyScheme

FORMAT = 1


def save(scheme: AnyScheme, group: Group, step: int, ledger: Ledger) -> dict[str, Any]:
    """Plain values and tensors, which `torch.load(…, weights_only=True)` reads."""
    return {
        "format": FORMAT,
        "scheme": repr(scheme),
        "rank": group.rank,
        "world": group.size,
        "step": step,
        "memory": ledger.state(),
    }


def check(
    state: Mapping[str, Any], scheme: AnyScheme, group: Group, ledger: Ledger, strict: bool
) -> None:
    """Refuse state of another format, scheme, rank or model, saying which."""
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise StateError(
            f"this is no state of a sparsewire exchange in format {FORMAT}; pass what "
            f"state_dict() returned"
        )
    missing = {"scheme", "rank", "world", "step", "memory"} - state.keys()
    if missing:
        raise StateError(f"the saved state lacks {', '.join(sorted(missing))}")
    step = state["step"]
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise StateError(f"the saved state's step is {step!r}, and should be a whole number")
    if strict and state["scheme"] != repr(scheme):
        raise StateError(
            f"the saved state is of {state['scheme']}, and this model runs {scheme!r}; attach with "
            f"the saved scheme, or pass strict=False to keep the memory"
        )
    if (state["rank"], state["world"]) != (group.rank, group.size):
        raise StateError(
            f"the saved state is of rank {state['rank']} of {state['world']}, and this is rank "
            f"{group.rank} of {group.size}: every rank saves and loads its own, and the number of "
            f"ranks must stay the same"
        )
    ledger.check(state["memory"])
