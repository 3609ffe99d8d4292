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

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .counters import Counters
from .errors import CorruptMessageError, ExchangeError, StateError
from .exchange import Call, Exchange, Finding, NonFinite, read_statuses, status_of
from .intra_node import Machine
from .message import (
    BUFFERS,
    CHECKSUM,
    FINE,
    SAMPLE,
    STATUS_BYTES,
    Context,
    Header,
    add_checksum_to,
    compare,
    corruption_code,
    fingerprint,
    gather_checked,
    gather_headers,
    matches_checksum,
)
from .report import Report
from .requests import Routine, all_gather, broadcast
from .scheme import AnyScheme, Scheme
from .segments import Segments, Shape
from .state import RESIDUAL, StateStore, StepState
from .workspace import Workspace


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
            "scheme": repr(self.scheme),
            "identity": self.scheme.identity,
            "rank": self.place[0],
            "world_size": self.place[1],
            "step": self.steps,
            "memory": self.store.state_dict(),
        }

    def check(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Refuse state of another scheme, rank or model, and say which.

        With `strict=False` the scheme may be another one.
        """
        self.check_scheme(state, strict)
        saved, mine = (state["rank"], state["world_size"]), self.place
        if saved != mine:
            remedy = "every rank saves and loads its own"
            if saved[1] != mine[1]:
                remedy = (
                    "to go on with another number of ranks, pass the list of all ranks' states "
                    "and on_world_size_change='resize'"
                )
            raise StateError(
                f"the saved state is of rank {saved[0]} of {saved[1]}, and this is rank {mine[0]} "
                f"of {mine[1]}: {remedy}"
            )
        self.store.check(state["memory"])

    def check_scheme(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Refuse state of another scheme, and what is no state at all, of whichever rank."""
        missing = {"scheme", "identity", "rank", "world_size", "step", "memory"} - state.keys()
        if missing:
            raise StateError(f"the saved state lacks {', '.join(sorted(missing))}")
        step = state["step"]
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 63:
            raise StateError(
                f"the saved state's step is {step!r}, and should be a whole number from 0 to "
                f"2^63 - 1"
            )
        if strict and state["identity"] != self.scheme.identity:
            raise StateError(
                f"the saved state is of {state['scheme']}, and this model runs {self.scheme!r}; "
                f"attach with the saved scheme, or pass strict=False to keep the memory"
            )

    @property
    def place(self) -> tuple[int, int]:
        """This rank among all ranks, and how many there are."""
        t = self.topology
        return t.rank * t.local_world_size + t.local_rank, t.world_size * t.local_world_size

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Go on from saved state, checked as a whole before anything changes."""
        self.check(state, strict)
        self.store.load_state_dict(state["memory"])
        self.steps = state["step"]


class Transaction:
    """One step of a session: exchanges, one comparison of status, and one of three ends.

    What one rank finds corrupt in a payload is compared with the statuses, so all ranks raise
    `CorruptMessageError`, and may repeat the step. A header, a status or a leader's note that
    arrives corrupt raises `ExchangeError` on this rank alone: it cannot know what the others saw,
    so the group is broken.
    """

    def __init__(self, session: Session) -> None:
        self.number = session.steps
        self.scheme = session.scheme.at(self.number)
        self._session = session
        self._lost: CorruptMessageError | None = None  # by which a machine's gradients are lost
        self._machine: Machine | None = None
        if session.topology.local_world_size > 1:
            at = session.topology
            place = at.local_rank, at.local_world_size, at.rank
            self._machine = Machine(*place, at.local_dtype, session.work)
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
        exchange, work = unit.exchange, self._session.work
        is_first, rank = not self._calls, self._session.topology.rank
        who = "rank" if self._machine is None else "machine"
        call = Call(self.number, rank, bucket, is_first, who=who)
        context = exchange.context(call)
        self._calls.append((exchange.segments, context))
        machine = self._machine
        if machine is None:
            yield from self._exchange(unit, call)
            return
        if exchange.compares_headers(call, unit.flat.device, work):
            call = replace(call, odd_local=(yield from machine.compare(exchange.header(call))))
        if not call.odd_local:  # else the leaders, who hear of it, raise on all ranks
            yield from machine.average(unit.flat, context)
        mean = unit.flat.view(torch.uint8)
        arrived, _ = yield from machine.follow(self._lead(unit, call), mean, context)
        mean.copy_(arrived)
        exchange.met(work)

    def _lead(self, unit: Unit, call: Call) -> Routine[Tensor]:
        """Exchange, as a machine's leader, and return the mean as bytes."""
        yield from self._exchange(unit, call)
        return unit.flat.view(torch.uint8)

    def _exchange(self, unit: Unit, call: Call) -> Routine[None]:
        session, exchange = self._session, unit.exchange
        kept, device = exchange.kept_as, unit.flat.device
        state = session.store.open(unit.key, exchange.fields(call.rank), kept, device)
        finding = yield from exchange.run(unit.flat, state, call, session.counters, session.work)
        self._findings.append((finding, state))
        session.counters.values += exchange.segments.size

    # -- what goes along with an exchange, after it: its headers say that all ranks take part ------

    def share(self, payload: Tensor) -> Routine[Tensor]:
        """Return rank 0's bytes on every rank, or this rank's own if they arrive corrupt."""
        context = replace(self._calls[-1][1], purpose=BUFFERS)
        if self._machine is None:
            return (yield from self._share(payload, context))
        routine = self._share(payload, context)
        arrived, is_fine = yield from self._machine.follow(routine, payload, context)
        return torch.where(is_fine, arrived, payload)

    def _share(self, payload: Tensor, context: Context) -> Routine[Tensor]:
        key = context.key(0)
        message = yield broadcast(add_checksum_to(payload, key), 0)
        is_fine = matches_checksum(message, key)
        self._note(torch.where(is_fine, FINE, corruption_code(0, CHECKSUM)))
        return torch.where(is_fine, message[: payload.numel()], payload)

    def gather(self, payload: Tensor) -> Routine[list[Tensor]]:
        """Return the bytes of every rank that exchanges."""
        context = replace(self._calls[-1][1], purpose=SAMPLE)
        rows, corruption = yield from gather_checked(payload, context, self._session.topology.rank)
        self._note(corruption)
        return rows

    def _note(self, corruption: Tensor) -> None:
        """Count corruption with what was found in the last exchange."""
        finding, state = self._findings[-1]
        first = finding.corruption
        corruption = torch.where(first == FINE, corruption, first)
        self._findings[-1] = replace(finding, corruption=corruption), state

    # -- what all ranks found --------------------------------------------------------------------

    def agree(self) -> Routine[NonFinite | None]:
        """Compare with all ranks what was found in the exchanges of this step.

        Returns None if every gradient holds the mean. Raises `CorruptMessageError`, on all
        ranks, if any message was corrupt.
        """
        topology, machine = self._session.topology, self._machine
        findings = [finding for finding, _ in self._findings]
        if machine is None:
            return read_statuses(self._calls, (yield from self._gather_statuses(findings)))
        codes = yield from machine.gather_corruption(self._calls[0][1])
        findings = [_with_code(f, code) for f, code in zip(findings, codes, strict=False)]
        nbytes = topology.world_size * STATUS_BYTES * len(self._calls)
        context = self._calls[0][1].status
        blank = torch.empty(nbytes, dtype=torch.uint8)
        statuses, is_fine = yield from machine.follow(
            self._gather_statuses(findings), blank, context
        )
        if not bool(is_fine):
            raise machine.unreadable(0, context)
        corruption = statuses.view(-1, STATUS_BYTES).view(torch.int64)[:, 0]
        try:
            return read_statuses(self._calls, statuses, "machine")
        except CorruptMessageError as error:
            if bool((corruption < FINE).any()):
                self._lost = error
            raise

    def _gather_statuses(self, findings: Sequence[Finding]) -> Routine[Tensor]:
        """Return the status messages of all ranks that exchange, one after another."""
        topology = self._session.topology
        rank = topology.rank if topology.status_rank is None else topology.status_rank
        answers = yield all_gather(status_of(findings, rank), group="status")
        return torch.cat(list(answers)).cpu()

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

        Raises an error on all ranks, and nothing has changed, if what went in arrived corrupt
        inside a machine, so that it is lost.
        """
        if self._lost is not None:
            self.rollback()
            raise ExchangeError(
                f"{self._lost}. What that machine was to send is lost, so the group is broken: "
                f"restart all ranks from a checkpoint"
            ) from self._lost
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
    compare((yield from gather_headers(own)), own, repr(scheme))


def _with_code(finding: Finding, code: int) -> Finding:
    """Return a leader's finding with what was found corrupt inside its machine, if anything.

    Corrupt gradients of the machine say nothing about whether its ranks' own are finite.
    """
    if code == FINE:
        return finding
    corruption = torch.full_like(finding.corruption, code)
    return replace(finding, corruption=corruption, non_finite=torch.full_like(corruption, FINE))
