"""One training step as a transaction, seen from one rank.

    transaction = session.begin()
    unit = transaction.unit(0, shapes, torch.float32, device)   # fill unit.flat with gradients
    yield from transaction.exchange(unit)                       # now it holds the mean, or so
    non_finite = yield from transaction.agree()                 # all ranks find the same
    transaction.commit()                                        # or rollback(), or defer()

`exchange` and `agree` are routines, which a driver of `groups/` carries out; nothing here knows of
networks or threads. Until a step ends, nothing that is kept has changed.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import errors, kernels
from .counters import Counters
from .errors import SparsewireError, StateError
from .exchange import Call, Exchange, Finding, NonFinite, read_statuses, status_of
from .message import FINE, STATUS_BYTES, Context, Header, compare, fingerprint
from .report import Report
from .requests import Routine, all_gather, all_reduce, broadcast
from .scheme import AnyScheme, Scheme
from .segments import Segments, Shape
from .state import RESIDUAL, StateStore, StepState
from .workspace import Workspace

FORMAT = 2
_NOTE_BYTES = 8192  # in which a leader tells its machine how an exchange ended
_TEXT = 1000  # characters of an error, each of up to six bytes


@dataclass(frozen=True)
class Topology:
    """Where a rank stands among those that exchange.

    Several ranks on one machine may take part as one: their gradients are averaged inside the
    machine, and the first of them, the leader, exchanges the average with the other leaders.

    Arguments:
        rank: of this rank, or of its machine's leader, among those that exchange.
        world_size: how many ranks exchange.
        status_rank: of this rank among those that compare status, if they are not the same ones.
        local_rank: of this rank on its machine; 0 leads.
        local_world_size: how many ranks of this machine take part as one.
        local_dtype: what is added up inside a machine; the gradient's own type if None.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    local_dtype: torch.dtype | None = None
    status_rank: int | None = None

    @property
    def leads(self) -> bool:
        """Whether this rank exchanges."""
        return self.local_rank == 0


@dataclass
class Unit:
    """Parameters that are exchanged together, in one flat tensor."""

    key: Hashable
    exchange: Exchange
    flat: Tensor

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and its part of the flat tensor, in the parameter's shape."""
        for param, view in self.exchange.segments.views(self.flat):
            yield param.name, view.view(param.shape)


class Session:
    """What one rank keeps while it trains: state, counters, and the step that it is at.

    Arguments:
        scheme: what is sent, and how.
        shapes: of all parameters, by name.
        topology: which rank this is.
        skips_unused: see `Exchange`.
        step: the first one's number.
        store, counters: to go on with; new ones if not given.
        before: another session, whose buffers and layouts this one takes over.
    """

    def __init__(
        self,
        scheme: AnyScheme,
        shapes: Mapping[str, tuple[int, ...]],
        topology: Topology | None = None,
        *,
        skips_unused: bool = False,
        step: int = 0,
        store: StateStore | None = None,
        counters: Counters | None = None,
        before: Session | None = None,
    ) -> None:
        self.scheme = scheme
        self.shapes = dict(shapes)
        self.topology = topology or Topology()
        self.skips_unused = skips_unused
        self.steps = step
        fields = scheme.fields if self.topology.leads else ()
        place = self.topology.rank, self.topology.world_size
        self.store = store or StateStore(fields, self.shapes, *place)
        self.counters = counters or Counters()
        self.work: Workspace = before.work if before else Workspace()
        self._exchanges: dict[Hashable, tuple[Exchange, tuple[str, ...]]] = (
            before._exchanges if before else {}
        )
        self._buffers: dict[Hashable, Tensor] = {}

    def begin(self) -> Transaction:
        """Begin a step. One that was broken off is forgotten."""
        self.store.discard()
        self.counters.begin_step()
        return Transaction(self)

    def undo(self) -> bool:
        """Take back the last committed step, if the next one has not begun yet."""
        undone = self.store.undo()
        if undone:
            self.steps -= 1
            self.counters.steps -= 1
        return undone

    def find_exchange(
        self, key: Hashable, scheme: Scheme, shapes: Mapping[str, Shape], dtype: torch.dtype
    ) -> Exchange:
        """Return the exchange of these parameters: that of the last step unless something
        changed."""
        names = tuple(shapes)  # their order counts: DDP rebuilds its buckets
        last = self._exchanges.get(key)
        if last is not None and (last[0].scheme, last[0].dtype, last[1]) == (scheme, dtype, names):
            return last[0]
        if last is not None:
            self.work.forget()  # what is kept for the last one is needed no longer
        segments = scheme.partition(shapes)
        exchange = Exchange(scheme, segments, self.topology.world_size, dtype, self.skips_unused)
        self._exchanges[key] = exchange, names
        return exchange

    def buffer(self, key: Hashable, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat tensor that is kept while its size and type stay the same."""
        kept = self._buffers.get(key)
        if kept is None or (kept.numel(), kept.dtype, kept.device) != (size, dtype, device):
            kept = self._buffers[key] = torch.zeros(size, dtype=dtype, device=device)
        return kept

    def residual(self, unit: Unit) -> Tensor | None:
        """Return a unit's residual as one flat tensor, to read; None if this rank keeps none."""
        exchange = unit.exchange
        if not self.topology.leads:
            return None
        kept, device = exchange.kept_as, unit.flat.device
        return self.store.flat(unit.key, RESIDUAL, exchange.segments, kept, device)

    def report(self, layers: bool = False) -> Report:
        """Return running totals; with `layers=True` the norms are also listed by parameter."""
        squares = self.store.squared_norms()
        return Report.of(
            repr(self.scheme), self.counters, self.topology.world_size, squares, layers
        )

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors, which `torch.load(…, weights_only=True)` reads."""
        return {
            "format": FORMAT,
            "scheme": repr(self.scheme),
            "identity": self.scheme.identity,
            "rank": self._place[0],
            "world_size": self._place[1],
            "step": self.steps,
            "memory": self.store.state_dict(),
        }

    def check(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Refuse state of another format, scheme, rank or model, and say which.

        With `strict=False` the scheme may be another one.
        """
        if not isinstance(state, Mapping) or not isinstance(state.get("format"), int):
            raise StateError(
                "this is no state of a sparsewire exchange; pass what state_dict() returned"
            )
        if state["format"] != FORMAT:
            raise StateError(
                f"the saved state has format {state['format']}, and this version of sparsewire "
                f"reads {FORMAT}: go on with the version that saved it, or begin with an empty "
                f"memory"
            )
        missing = {"scheme", "identity", "rank", "world_size", "step", "memory"} - state.keys()
        if missing:
            raise StateError(f"the saved state lacks {', '.join(sorted(missing))}")
        step = state["step"]
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise StateError(f"the saved state's step is {step!r}, and should be a whole number")
        if strict and state["identity"] != self.scheme.identity:
            raise StateError(
                f"the saved state is of {state['scheme']}, and this model runs {self.scheme!r}; "
                f"attach with the saved scheme, or pass strict=False to keep the memory"
            )
        mine = self._place
        if (state["rank"], state["world_size"]) != mine:
            raise StateError(
                f"the saved state is of rank {state['rank']} of {state['world_size']}, and this is "
                f"rank {mine[0]} of {mine[1]}: every rank saves and loads its own, and the number "
                f"of ranks must stay the same"
            )
        self.store.check(state["memory"])

    @property
    def _place(self) -> tuple[int, int]:
        """This rank among all ranks, and how many there are."""
        t = self.topology
        return t.rank * t.local_world_size + t.local_rank, t.world_size * t.local_world_size

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Go on from saved state, checked as a whole before anything changes."""
        self.check(state, strict)
        self.store.load_state_dict(state["memory"])
        self.steps = state["step"]


class Transaction:
    """One step of a session: exchanges, one comparison of status, and one of three ends."""

    def __init__(self, session: Session) -> None:
        self.number = session.steps
        self.scheme = session.scheme.at(self.number)
        self._session = session
        self._calls: list[tuple[Segments, Context]] = []
        self._findings: list[tuple[Finding, StepState]] = []

    def unit(
        self,
        key: Hashable,
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        device: torch.device,
        flat: Tensor | None = None,
    ) -> Unit:
        """Return the parameters of these shapes as a unit, which is known by `key` in every step.

        `flat` may be a tensor that holds them one after another; otherwise the session keeps one.
        """
        session = self._session
        exchange = session.find_exchange(key, self.scheme, shapes, dtype)
        if flat is None:
            flat = session.buffer(key, exchange.segments.size, dtype, device)
        return Unit(key, exchange, flat)

    def exchange(self, unit: Unit, bucket: int = 0) -> Routine[None]:
        """Replace the unit's gradients by their mean over all ranks, if nothing is found wrong."""
        topology = self._session.topology
        if topology.local_world_size == 1:
            yield from self._exchange(unit, bucket)
            return
        flat = unit.flat
        scaled = flat.to(topology.local_dtype or flat.dtype) * (1 / topology.local_world_size)
        flat.copy_((yield all_reduce(scaled, "intra_node")))
        yield from self._lead(self._exchange(unit, bucket))
        mean = yield broadcast(flat.view(torch.uint8), 0, "intra_node")
        flat.view(torch.uint8).copy_(mean)

    def _exchange(self, unit: Unit, bucket: int) -> Routine[None]:
        """Exchange among the ranks that do; on others only note that they do."""
        session, exchange = self._session, unit.exchange
        rank = session.topology.rank
        call = Call(self.number, rank, bucket, opens=not self._calls)
        self._calls.append((exchange.segments, exchange.context(call)))
        if not session.topology.leads:
            return
        kept, device = exchange.kept_as, unit.flat.device
        state = session.store.open(unit.key, exchange.fields(rank), kept, device)
        finding = yield from exchange.run(unit.flat, state, call, session.counters, session.work)
        self._findings.append((finding, state))
        session.counters.values += exchange.segments.size

    def _lead(self, routine: Routine[Any]) -> Routine[Any]:
        """Run a routine on every rank of a machine; what it raises on the leader is raised on
        all."""
        result, error = None, None
        try:
            result = yield from routine
        except SparsewireError as raised:
            error = raised
        told = yield broadcast(_pack_error(error), 0, "intra_node")
        error = error or _unpack_error(told)
        if error is not None:
            raise error
        return result

    def agree(self) -> Routine[NonFinite | None]:
        """Compare with all ranks what was found in the exchanges of this step.

        Returns None if every gradient holds the mean. Raises `CorruptMessageError`, on all
        ranks, if any message was corrupt.
        """
        topology = self._session.topology
        if topology.local_world_size == 1:
            return read_statuses(self._calls, (yield from self._statuses()))
        statuses = yield from self._lead(self._statuses())
        statuses = yield broadcast(statuses, 0, "intra_node")
        found = read_statuses(self._calls, statuses)
        return None if found is None else replace(found, who="node")

    def _statuses(self) -> Routine[Tensor]:
        """Return the status messages of all ranks that exchange; on others, memory for them."""
        topology = self._session.topology
        if not topology.leads:
            nbytes = STATUS_BYTES * len(self._calls)
            return torch.zeros(topology.world_size, nbytes, dtype=torch.uint8)
        rank = topology.rank if topology.status_rank is None else topology.status_rank
        own = status_of([finding for finding, _ in self._findings], rank)
        answers = yield all_gather(own, group="status")
        return torch.stack(list(answers)).cpu()

    # -- how a step ends -------------------------------------------------------------------------

    def commit(self) -> None:
        """The step took place."""
        session = self._session
        session.counters.end_step()
        session.store.commit()
        session.steps += 1
        session.counters.steps += 1

    def rollback(self) -> None:
        """The step did not take place: nothing that is kept has changed."""
        self._session.counters.end_step()
        self._session.store.discard()

    def defer(self) -> None:
        """Nothing was sent, but what was to be sent stays in the residual, for the next step.

        For what went in cannot be had again, as with updates that an optimizer has computed. What
        is not finite is dropped, or it would stay there for good.
        """
        if any(int(finding.selection.non_finite) != FINE for finding, _ in self._findings):
            self.rollback()
            return
        for finding, state in self._findings:
            selection, returned = finding.selection, finding.returned
            values = selection.values if returned is None else selection.values - returned
            values = values * self.scheme.memory.decay
            residual, segments = state.after[RESIDUAL], finding.segments
            wide = residual.to(values.dtype)
            kernel = kernels.on(values.device)
            kernel.put_back(wide, selection.indices, values, segments, self._session.work)
            residual.copy_(wide)
        self._session.counters.end_step()
        self._session.store.commit_only(RESIDUAL)


def handshake(
    rank: int, scheme: AnyScheme, parameters: Mapping[str, Tensor], options: str = ""
) -> Routine[None]:
    """Raise `DisagreementError` on all ranks unless all have the same scheme and parameters.

    `options` is whatever else must be the same for the ranks to stay together. The messages have a
    fixed size, so that ranks that differ in anything can still compare it.
    """
    layout = fingerprint(*(f"{n}:{tuple(p.shape)}:{p.dtype}" for n, p in parameters.items()))
    own = Header(rank, 0, 0, fingerprint(scheme.identity, options), layout, 0)
    answers: Sequence[Tensor] = yield all_gather(own.pack())
    headers = [Header.unpack(data, sender) for sender, data in enumerate(answers)]
    compare(headers, own, repr(scheme))


def _pack_error(error: SparsewireError | None) -> Tensor:
    """An error as uint8 tensor of a fixed size; empty text for none."""
    told = "" if error is None else json.dumps([type(error).__name__, str(error)[:_TEXT]])
    return torch.frombuffer(bytearray(told.encode().ljust(_NOTE_BYTES)), dtype=torch.uint8)


def _unpack_error(data: Tensor) -> SparsewireError | None:
    """The error that a leader told its machine of, if any."""
    told = data.cpu().numpy().tobytes().strip()
    if not told:
        return None
    name, text = json.loads(told)
    error: SparsewireError = _ERRORS[name](text)
    return error


_ERRORS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, SparsewireError)
}
