"""The exchange as a function, for your own training loop: gradients and state in, both out.

state = functional.init("TopK(0.01)", dict(model.named_parameters()))
mean, state = functional.exchange(gradients, state, group)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from threading import get_ident

import torch
from torch import Tensor

from . import kernels
from .counters import Counters
from .errors import NonFiniteError, StateError
from .exchange import NonFinite
from .groups import Group, drive
from .groups.connection import Connection
from .groups.simulated import SimulatedGroup
from .groups.thread import Watcher
from .requests import Routine
from .scheme import AnyScheme, as_scheme
from .selectors import Selector
from .session import Session, Topology
from .state import Saved, StateStore

__all__ = ["State", "exchange", "init", "simulate"]


@dataclass(frozen=True, eq=False)
class State:
    """The state that a rank carries from step to step. `init` makes the first one.

    It is frozen, except that `counters` keeps counting. To save a state, save its scheme's text,
    its step and its memory; to load it, pass them to `State`.

    Arguments:
        scheme: The scheme.
        step: The number of steps done.
        memory: The kept tensors by parameter name and field, such as
            `memory["weight"]["residual"]`.
        counters: Running totals, such as `counters.bytes_sent`. All states that follow from each
            other share them.

    >>> import io
    >>> import torch
    >>> import sparsewire as sw
    >>> state = sw.functional.init("TopK(0.1)", {"w": torch.zeros(64, 64)})
    >>> file = io.BytesIO()
    >>> torch.save({"scheme": repr(state.scheme), "step": 0, "memory": state.memory}, file)
    >>> _ = file.seek(0)
    >>> saved = torch.load(file, weights_only=True)
    >>> again = sw.functional.State(sw.parse(saved["scheme"]), saved["step"], saved["memory"])
    """

    scheme: AnyScheme
    step: int
    memory: Saved
    counters: Counters = field(default_factory=Counters)
    _session: Session | None = field(default=None, repr=False)  # that made it; may be lost
    _thread: int = field(default=0, repr=False)  # in which it was made


def init(scheme: AnyScheme | Selector | str, parameters: Mapping[str, Tensor]) -> State:
    """Return the state before the first step.

    Arguments:
        scheme: What to send: a `Scheme`, a `Warmup`, a selector, or the text of any of them.
        parameters: The parameters by name. Only their shapes, types and devices matter.
    """
    chosen = as_scheme(scheme)
    for kind in {p.device.type for p in parameters.values()}:
        kernels.prepare(kind)
    memory = {
        name: {
            field.key: torch.zeros(
                p.shape, dtype=chosen.memory.kept_as(_sum_dtype([p])), device=p.device
            )
            for field in chosen.fields
            if field.extent == "coordinate"
        }
        for name, p in parameters.items()
    }
    return State(chosen, 0, memory)


def exchange(
    gradients: Mapping[str, Tensor], state: State, group: Group
) -> tuple[dict[str, Tensor], State]:
    """Return the mean gradient over all ranks of a group, and the state for the next step.

    The gradients and the tensors of the given state are not changed, so that a step can be undone
    by going back to its state.

    Arguments:
        gradients: This rank's gradients by name: all parameters that were passed to `init`, in the
            same order on all ranks.
        state: This rank's state.
        group: A `DistributedGroup` or `Alone`.

    Raises:
        NonFiniteError: A gradient on any rank has NaN or infinity. All ranks raise it.
        ExchangeError: The exchange could not finish.

    >>> import torch
    >>> import sparsewire as sw
    >>> state = sw.functional.init("TopK(0.1)", {"w": torch.zeros(64, 64)})
    >>> gradients = {"w": torch.randn(64, 64)}
    >>> mean, state = sw.functional.exchange(gradients, state, sw.groups.Alone())
    >>> state.step, int(mean["w"].count_nonzero())
    (1, 410)
    """
    job = _Job(gradients, state, group.rank, group.size)
    if not isinstance(group, Connection):
        return job.end(drive(job.run(), group, state.counters))
    if group not in _watchers:
        watcher = _watchers[group] = Watcher(group.liveness, lambda error: None)
        weakref.finalize(group, watcher.stop)
    group.doing = f"the exchange of step {state.step}"
    try:
        return job.end(drive(job.run(), group, state.counters))
    finally:
        group.finish()


_watchers: weakref.WeakKeyDictionary[Connection, Watcher] = weakref.WeakKeyDictionary()


def simulate(
    gradients: Sequence[Mapping[str, Tensor]], states: Sequence[State]
) -> tuple[dict[str, Tensor], list[State]]:
    """Exchange the gradients of several workers in one process.

    The result is bit for bit that of as many real processes.

    Arguments:
        gradients: One dictionary of gradients for each worker.
        states: One state for each worker.

    Returns:
        The mean gradient, and the next state of every worker.

    >>> import torch
    >>> import sparsewire as sw
    >>> parameters = {"w": torch.zeros(64, 64)}
    >>> states = [sw.functional.init("RandomK(0.1)", parameters) for _ in range(3)]
    >>> gradients = [{"w": torch.full((64, 64), float(worker))} for worker in range(3)]
    >>> mean, states = sw.functional.simulate(gradients, states)
    >>> sorted(set(mean["w"].flatten().tolist()))
    [0.0, 1.0]
    """
    if not gradients or len(gradients) != len(states):
        raise StateError(
            f"simulate() takes one gradient and one state per worker, not {len(gradients)} and "
            f"{len(states)}"
        )
    size = len(gradients)
    jobs = [
        _Job(g, s, rank, size) for rank, (g, s) in enumerate(zip(gradients, states, strict=True))
    ]
    found = SimulatedGroup(size).drive([job.run() for job in jobs], [s.counters for s in states])
    ends = [job.end(non_finite) for job, non_finite in zip(jobs, found, strict=True)]
    return ends[0][0], [state for _, state in ends]


class _Job:
    """One rank's part in one exchange of all parameters."""

    def __init__(self, gradients: Mapping[str, Tensor], state: State, rank: int, size: int) -> None:
        self._state = state
        self._gradients = gradients
        shapes = {name: tuple(g.shape) for name, g in gradients.items()}
        store = _store_of(state, shapes, rank, size)
        # several workers or threads may start from one state, but must not share a workspace
        before = state._session
        if before is not None and before.topology != Topology(rank, size):
            before = None
        self._session = Session(
            state.scheme,
            shapes,
            Topology(rank, size),
            step=state.step,
            store=store,
            counters=state.counters,
            before=before,
        )
        if state._thread != get_ident():
            self._session.work = copy(self._session.work)
        self._transaction = self._session.begin()
        device = next((g.device for g in gradients.values()), torch.device("cpu"))
        dtype, length = _sum_dtype(gradients.values()), sum(g.numel() for g in gradients.values())
        flat = torch.empty(length, dtype=dtype, device=device)
        self._unit = self._transaction.unit(0, shapes, dtype, device, flat)
        for name, view in self._unit.views():
            view.copy_(gradients[name].detach())

    def run(self) -> Routine[NonFinite | None]:
        """Return the routine of the exchange, for a driver."""
        yield from self._transaction.exchange(self._unit)
        return (yield from self._transaction.agree())

    def end(self, non_finite: NonFinite | None) -> tuple[dict[str, Tensor], State]:
        """Return the mean and the next state."""
        state, session = self._state, self._session
        if non_finite is not None:
            self._transaction.rollback()
            raise NonFiniteError(
                f"NaN or infinity in the gradient at step {state.step}: {non_finite}; the state "
                f"is as it was"
            )
        self._transaction.commit()
        session.store.release()
        views = dict(self._unit.views())
        mean = {name: views[name].to(g.dtype) for name, g in self._gradients.items()}
        memory = {name: session.store.get(name) for name in self._gradients}
        return mean, replace(
            state, step=session.steps, memory=memory, _session=session, _thread=get_ident()
        )


def _store_of(
    state: State, shapes: Mapping[str, tuple[int, ...]], rank: int, world_size: int
) -> StateStore:
    """Return a store with the memory of a state, whose steps do not change that memory."""
    last = state._session
    if last is not None and _holds(last.store, state.memory, shapes, rank, world_size):
        return last.store.fork()
    store = StateStore(state.scheme.fields, shapes, rank, world_size)
    blank = store.state_dict()  # what a rank owns is not known before the first exchange
    store.check({name: {**blank.get(name, {}), **held} for name, held in state.memory.items()})
    store.adopt(state.memory)
    return store


def _holds(
    store: StateStore,
    memory: Mapping[str, Mapping[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    world_size: int,
) -> bool:
    """Return whether a store still has these very tensors, not others in their place."""
    if (store.shapes, store.rank, store.world_size) != (shapes, rank, world_size):
        return False
    return memory.keys() == shapes.keys() and all(
        memory[name].keys() == held.keys()
        and all(_is_same(memory[name][key], tensor) for key, tensor in held.items())
        for name in shapes
        for held in [store.get(name)]
    )


def _is_same(one: Tensor, other: Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.dtype) == (other.data_ptr(), other.shape, other.dtype)


def _sum_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
