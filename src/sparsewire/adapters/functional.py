"""Exchange as a function, for people who write their own loop: gradients and state in, both out.

state = sw.init("TopK(0.01)", dict(model.named_parameters()))
mean, state = sw.exchange(gradients, state, group)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .. import kernels
from ..desk import Call
from ..engine import Exchange, Finding, Unsound, agree
from ..errors import NonFiniteError, StateError
from ..groups import Group, drive
from ..groups.simulated import SimulatedGroup
from ..ledger import Ledger, Remembered
from ..memory import LEDGER
from ..meter import Meter
from ..requests import Routine
from ..scheme import AnyScheme, Scheme, as_scheme
from ..segments import Span
from ..selectors import Selector
from ..shards import OWNED
from ..workspace import Workspace


@dataclass(frozen=True, eq=False)
class State:
    """What a rank carries from step to step. `meter` keeps running totals."""

    scheme: AnyScheme
    step: int
    memory: Remembered
    meter: Meter = field(default_factory=Meter)
    _drawer: _Drawer = field(default_factory=lambda: _Drawer(), repr=False)


def init(scheme: AnyScheme | Selector | str, parameters: Mapping[str, Tensor]) -> State:
    """The state before the first step."""
    chosen = as_scheme(scheme)
    for kind in {p.device.type for p in parameters.values()}:
        kernels.prepare(kind)
    memory = {
        name: {
            kind: torch.zeros(
                p.shape, dtype=chosen.memory.kept_as(_ledger_dtype([p])), device=p.device
            )
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
    finding = drive(job.run(state._drawer.work), group, state.meter)
    return job.end(drive(agree([finding], group.rank), group, state.meter))


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
    group, meters = SimulatedGroup(size), [state.meter for state in states]
    # workers may have been given one state, but never share a workspace
    findings = group.drive([job.run(Workspace()) for job in jobs], meters)
    verdicts = group.drive([agree([f], rank) for rank, f in enumerate(findings)], meters)
    ends = [job.end(verdict) for job, verdict in zip(jobs, verdicts, strict=True)]
    return ends[0][0], [state for _, state in ends]


@dataclass(frozen=True)
class _Drawer:
    """What a rank need not work out anew at every step; losing it changes nothing."""

    exchanges: dict[object, Exchange] = field(default_factory=dict)
    work: Workspace = field(default_factory=Workspace)
    spans: dict[str, tuple[Span, ...]] = field(default_factory=dict)  # of each field
    fields: dict[str, Tensor] = field(default_factory=dict)  # the memory, flat

    def holds(self, memory: Remembered) -> bool:
        """Whether the memory's tensors are still views of `fields`, not others in their place."""
        return all(
            kept.dtype == flat.dtype
            and kept.shape == span.shape
            and kept.data_ptr() == flat[span.start : span.stop].data_ptr()
            for name, flat in self.fields.items()
            for span in self.spans[name]
            for kept in [memory[span.name][name]]
            if span.length
        )


class _Job:
    """One rank's part in one exchange of all parameters together."""

    def __init__(self, gradients: Mapping[str, Tensor], state: State, rank: int, size: int) -> None:
        self._state = state
        self._gradients = gradients
        scheme = state.scheme.at(state.step)
        shapes = {name: tuple(g.shape) for name, g in gradients.items()}
        self._exchange = self._find_exchange(scheme, shapes)
        segments, dtype = self._exchange.segments, self._exchange.dtype
        kept = scheme.memory.kept_as(dtype)
        device = next((g.device for g in gradients.values()), torch.device("cpu"))
        self._flat = torch.empty(segments.size, dtype=dtype, device=device)
        for span, view in segments.views(self._flat):
            view.view(span.shape).copy_(gradients[span.name].detach())
        self._call = Call(state.step, rank, size)
        self._cuts = dict.fromkeys({*scheme.memory.fields, LEDGER}, segments)
        shard = self._exchange.shard(rank, size)
        if shard is not None:
            self._cuts[OWNED] = shard
        self._before = self._lay_out(shapes, kept, device)
        self._after = {
            name: torch.zeros(cut.size + 1, dtype=kept, device=device)
            for name, cut in self._cuts.items()
        }

    def _find_exchange(self, scheme: Scheme, shapes: dict[str, tuple[int, ...]]) -> Exchange:
        dtype = _ledger_dtype(self._gradients.values())
        exchanges, key = self._state._drawer.exchanges, (scheme, tuple(shapes.items()), dtype)
        if key not in exchanges:
            exchanges.clear()  # an eased ratio changes at every step
            exchanges[key] = Exchange(scheme, scheme.cut(shapes), dtype)
        return exchanges[key]

    def _lay_out(
        self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """The memory in flat tensors: those of the last step, or filled anew."""
        drawer, memory, fields = self._state._drawer, self._state.memory, self._state.scheme.fields
        cuts = {field: cut for field, cut in self._cuts.items() if field in fields}
        spans = {field: cut.spans for field, cut in cuts.items()}
        if drawer.spans == spans and drawer.holds(memory):
            return drawer.fields
        ledger = Ledger(fields, shapes, self._call.rank, self._call.world)
        blank = ledger.state()  # of what a rank owns nothing is known before the first exchange
        ledger.check({n: {**blank.get(n, {}), **kept} for n, kept in memory.items()})
        flat = {f: torch.zeros(c.size + 1, dtype=dtype, device=device) for f, c in cuts.items()}
        for kind, tensor in flat.items():
            for span, view in cuts[kind].views(tensor):
                kept = memory[span.name]
                if kind in kept:
                    view.view(span.shape).copy_(kept[kind])
        return flat

    def run(self, work: Workspace) -> Routine[Finding]:
        """The exchange itself, for a driver."""
        return self._exchange.run(
            self._flat, self._before, self._after, self._call, self._state.meter, work
        )

    def end(self, verdict: Unsound | None) -> tuple[dict[str, Tensor], State]:
        """Mean and next state."""
        state, segments = self._state, self._exchange.segments
        if verdict is not None:
            raise NonFiniteError(
                f"NaN or infinity in the gradient at step {state.step}: {verdict}; the state "
                f"is as it was"
            )
        state.meter.steps += 1
        state.meter.values += segments.size
        mean = {
            span.name: view.view(span.shape).to(self._gradients[span.name].dtype)
            for span, view in segments.views(self._flat)
        }
        memory: Remembered = {name: dict(state.memory[name]) for name in self._gradients}
        kept = {kind: self._after[kind] for kind in self._before}
        for kind, tensor in kept.items():
            for span, view in self._cuts[kind].views(tensor):
                memory[span.name][kind] = view.view(span.shape)
        spans = {kind: self._cuts[kind].spans for kind in kept}
        drawer = _Drawer(state._drawer.exchanges, state._drawer.work, spans, kept)
        ordered = {name: mean[name] for name in self._gradients}
        return ordered, replace(state, step=state.step + 1, memory=memory, _drawer=drawer)


def _ledger_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
