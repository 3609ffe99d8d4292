"""Exchange as a function, for people who write their own loop: gradients and state in, both out.

state = sw.init("TopK(0.01)", dict(model.named_parameters()))
mean, state = sw.exchange(gradients, state, group)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..desk import Call
from ..engine import Exchange, Outcome, Run
from ..errors import NonFiniteError, StateError
from ..groups import Group, drive
from ..groups.simulated import SimulatedGroup
from ..ledger import Ledger, Remembered
from ..meter import Meter
from ..scheme import AnyScheme, as_scheme
from ..segments import Segments
from ..selectors import Selector


@dataclass(frozen=True, eq=False)
class State:
    """What a rank carries from step to step. `meter` keeps running totals."""

    scheme: AnyScheme
    step: int
    memory: Remembered
    meter: Meter = field(default_factory=Meter)


def init(scheme: AnyScheme | Selector | str, parameters: Mapping[str, Tensor]) -> State:
    """The state before the first step."""
    chosen = as_scheme(scheme)
    memory = {
        name: {
            kind: torch.zeros(p.shape, dtype=_ledger_dtype([p]), device=p.device)
            for kind in chosen.memory.fields
        }
        for name, p in parameters.items()
    }
    return State(chosen, 0, memory)


def exchange(
    gradients: Mapping[str, Tensor], state: State, group: Group
) -> tuple[dict[str, Tensor], State]:
    """The mean gradient over all ranks of `group`, and the state for the next step.

    The state's tensors are left as they are; its meter counts on. NaN or infinity on any rank
    raises `NonFiniteError` on all.
    """
    job = _Job(gradients, state, group.rank, group.size)
    group.doing = f"the exchange of step {state.step}"
    return job.end(drive(job.run(), group, state.meter))


def simulate(
    gradients: Sequence[Mapping[str, Tensor]], states: Sequence[State]
) -> tuple[dict[str, Tensor], list[State]]:
    """The same for all workers at once, in one process: the mean, and every worker's next state."""
    if not gradients or len(gradients) != len(states):
        raise StateError(
            f"simulate() takes one gradient and one state per worker, not {len(gradients)} and "
            f"{len(states)}"
        )
    size = len(gradients)
    jobs = [
        _Job(g, s, rank, size) for rank, (g, s) in enumerate(zip(gradients, states, strict=True))
    ]
    outcome = SimulatedGroup(size).drive([job.run() for job in jobs], [s.meter for s in states])
    ends = [job.end(outcome) for job in jobs]
    return ends[0][0], [state for _, state in ends]


class _Job:
    """One rank's part in one exchange of all parameters together."""

    def __init__(self, gradients: Mapping[str, Tensor], state: State, rank: int, size: int) -> None:
        self._state = state
        self._gradients = gradients
        scheme = state.scheme.at(state.step)
        shapes = {name: tuple(g.shape) for name, g in gradients.items()}
        self._ledger = Ledger(scheme.memory.fields, shapes)
        self._ledger.load(state.memory)
        self._segments: Segments = scheme.cut(shapes)
        dtype = _ledger_dtype(gradients.values())
        self._exchange = Exchange(scheme, self._segments, dtype)
        device = next((g.device for g in gradients.values()), None)
        self._flat = torch.empty(self._segments.size, dtype=dtype, device=device)
        for span, view in self._segments.views(self._flat):
            view.view(span.shape).copy_(gradients[span.name].detach())
        self._call = Call(state.step, rank, size)

    def run(self) -> Run:
        """The exchange itself, for a driver."""
        flat = self._flat
        before, after = self._ledger.open(0, self._segments, flat.dtype, flat.device)
        return self._exchange.run(flat, before, after, self._call, self._state.meter)

    def end(self, outcome: Outcome) -> tuple[dict[str, Tensor], State]:
        """Mean and next state."""
        verdict = outcome.settle()
        if verdict is not None:
            raise NonFiniteError(
                f"NaN or infinity in the gradient at step {self._state.step}: {verdict}; the state "
                f"is as it was"
            )
        self._ledger.commit()
        meter = self._state.meter
        meter.steps += 1
        meter.values += self._segments.size
        mean = {
            span.name: view.view(span.shape).to(self._gradients[span.name].dtype)
            for span, view in self._segments.views(self._flat)
        }
        ordered = {name: mean[name] for name in self._gradients}
        memory = self._ledger.state()
        return ordered, replace(self._state, step=self._state.step + 1, memory=memory)


def _ledger_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
