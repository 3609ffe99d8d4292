"""One training step as a transaction, seen from one rank.

    transaction = session.begin()
    unit = transaction.unit(0, shapes, torch.float32, device)   # fill unit.flat with gradients
    yield from transaction.exchange(unit)                       # unit.flat now holds the mean
    non_finite = yield from transaction.agree()                 # the same result on all ranks
    transaction.commit()                                        # or rollback(), or defer()

`exchange` and `agree` are routines, which a driver in `groups/` carries out. This module contains
no network or thread code. The state does not change until a step ends.
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
    """A rank's position in the exchange.

    Several ranks on one machine may take part as one: their gradients are averaged inside the
    machine, and the first of them, the leader, exchanges the average with the other leaders.

    Arguments:
        rank: The number of this rank, or of its machine's leader, in the exchange.
        world_size: The number of ranks that exchange.
        status_rank: This rank's number in the status group, if it differs from `rank`.
        local_rank: This rank's number on its machine. Rank 0 is the leader.
        local_world_size: The number of ranks on this machine that take part as one.
        local_dtype: The type of the sums inside a machine. If None, the gradient's type.
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
    """The parameters that are exchanged together, in one flat tensor."""

    key: Hashable
    exchange: Exchange
    flat: Tensor

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and its part of the flat tensor, in the parameter's shape."""
        for param, view in self.exchange.segments.views(self.flat):
            yield param.name, view.view(param.shape)


class Session:
    """One rank's training session: its state, counters and current step.

    Arguments:
        scheme: The scheme to run.
        shapes: The shapes of all parameters by name.
        topology: This rank's position in the exchange.
        skips_unused: See `Exchange`.
        step: The number of the first step.
        store, counters: Existing state and counters to continue with. If None, new ones.
        before: An earlier session whose buffers and layouts are reused.
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
        """Begin a step, and discard one that was aborted."""
        self.store.discard()
        self.counters.begin_step()
        return Transaction(self)

    def undo(self) -> bool:
        """Undo the last committed step, if the next one has not begun. Return whether it did."""
        undone = self.store.undo()
        if undone:
            self.steps -= 1
            self.counters.steps -= 1
        return undone

    def find_exchange(
        self, key: Hashable, scheme: Scheme, shapes: Mapping[str, Shape], dtype: torch.dtype
    ) -> Exchange:
        """Return the exchange of these parameters, reused from the last step if nothing changed."""
        names = tuple(shapes)  # the order matters: DDP rebuilds its buckets
        last = self._exchanges.get(key)
        if last is not None and (last[0].scheme, last[0].dtype, last[1]) == (scheme, dtype, names):
            return last[0]
        if last is not None:
            self.work.forget()  # its tables belong to the old exchange
        segments = scheme.partition(shapes)
        exchange = Exchange(scheme, segments, self.topology.world_size, dtype, self.skips_unused)
        self._exchanges[key] = exchange, names
        return exchange

    def buffer(self, key: Hashable, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat tensor, reused while its size and type stay the same."""
        kept = self._buffers.get(key)
        if kept is None or (kept.numel(), kept.dtype, kept.device) != (size, dtype, device):
            kept = self._buffers[key] = torch.zeros(size, dtype=dtype, device=device)
        return kept

    def residual(self, unit: Unit) -> Tensor | None:
        """Return a unit's residual as one flat tensor, only to read; None if there is none."""
        exchange = unit.exchange
        if not self.topology.leads:
            return None
        kept, device = exchange.kept_as, unit.flat.device
        return self.store.flat(unit.key, RESIDUAL, exchange.segments, kept, device)

    def report(self, layers: bool = False) -> Report:
        """Return running totals. With `layers=True`, include the norms by parameter."""
        squares = self.store.squared_norms()
        return Report.of(
            repr(self.scheme), self.counters, self.topology.world_size, squares, layers
        )

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and tensors, for `torch.load(…, weights_only=True)`."""
        return {
            "scheme": repr(self.scheme),
            "identity": self.scheme.identity,
            "rank": self.place[0],
            "world_size": self.place[1],
            "step": self.steps,
            "memory": self.store.state_dict(),
        }

    def check(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Raise unless the state belongs to this scheme, rank and model.

        With `strict=False` the scheme may differ.
        """
        self.check_scheme(state, strict)
        saved, mine = (state["rank"], state["world_size"]), self.place
        if saved != mine:
            remedy = "every rank saves and loads its own"
            if saved[1] != mine[1]:
                remedy = (
                    "to resume with another number of ranks, pass the list of all ranks' states "
                    "and on_world_size_change='resize'"
                )
            raise StateError(
                f"the saved state is from rank {saved[0]} of {saved[1]}, and this is rank "
                f"{mine[0]} of {mine[1]}: {remedy}"
            )
        self.store.check(state["memory"])

    def check_scheme(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Raise unless this is a state of this scheme, saved by any rank."""
        missing = {"scheme", "identity", "rank", "world_size", "step", "memory"} - state.keys()
        if missing:
            raise StateError(f"the saved state lacks {', '.join(sorted(missing))}")
        step = state["step"]
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 63:
            raise StateError(
                f"the saved state's step is {step!r}, which is not a whole number from 0 to "
                f"2^63 - 1. Pass what state_dict() returned, unchanged"
            )
        if strict and state["identity"] != self.scheme.identity:
            raise StateError(
                f"the saved state is from {state['scheme']}, and this model runs {self.scheme!r}; "
                f"attach with the saved scheme, or pass strict=False to keep the memory"
            )

    @property
    def place(self) -> tuple[int, int]:
        """This rank's number among all ranks, and the number of all ranks."""
        t = self.topology
        return t.rank * t.local_world_size + t.local_rank, t.world_size * t.local_world_size

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Resume from saved state. It is checked as a whole before anything changes."""
        self.check(state, strict)
        self.store.load_state_dict(state["memory"])
        self.steps = state["step"]


class Transaction:
    """One step of a session: exchanges, a comparison of statuses, then commit, rollback or defer.

    If one rank receives a corrupt payload, the statuses tell all ranks. They all raise
    `CorruptMessageError` and may repeat the step. If a header, a status or a leader's message
    arrives corrupt, only this rank raises `ExchangeError`. It cannot know what the others
    received, so the group is broken.
    """

    def __init__(self, session: Session) -> None:
        self.number = session.steps
        self.scheme = session.scheme.at(self.number)
        self._session = session
        self._lost: CorruptMessageError | None = None  # set if a machine's gradients were lost
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
        """Return a unit with the parameters of these shapes. `key` identifies it in every step.

        `flat` may be a tensor that holds them one after another. If None, the session keeps one.
        """
        session = self._session
        exchange = session.find_exchange(key, self.scheme, shapes, dtype)
        if flat is None:
            flat = session.buffer(key, exchange.segments.size, dtype, device)
        return Unit(key, exchange, flat)

    def exchange(self, unit: Unit, bucket: int = 0) -> Routine[None]:
        """Replace the unit's gradients by the mean of all messages, unless one is corrupt."""
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
        if not call.odd_local:  # else the leaders' headers make all ranks raise
            yield from machine.average(unit.flat, context)
        mean = unit.flat.view(torch.uint8)
        arrived, _ = yield from machine.follow(self._lead(unit, call), mean, context)
        mean.copy_(arrived)
        exchange.met(work)

    def _lead(self, unit: Unit, call: Call) -> Routine[Tensor]:
        """Exchange as a machine's leader, and return the mean as bytes."""
        yield from self._exchange(unit, call)
        return unit.flat.view(torch.uint8)

    def _exchange(self, unit: Unit, call: Call) -> Routine[None]:
        session, exchange = self._session, unit.exchange
        kept, device = exchange.kept_as, unit.flat.device
        state = session.store.open(unit.key, exchange.fields(call.rank), kept, device)
        finding = yield from exchange.run(unit.flat, state, call, session.counters, session.work)
        self._findings.append((finding, state))
        session.counters.values += exchange.segments.size

    # -- extra messages after an exchange, whose headers have shown that all ranks take part -------

    def share(self, payload: Tensor) -> Routine[Tensor]:
        """Broadcast rank 0's bytes. If they arrive corrupt, return this rank's own payload."""
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
        """Return the payloads of all ranks that exchange."""
        context = replace(self._calls[-1][1], purpose=SAMPLE)
        rows, corruption = yield from gather_checked(payload, context, self._session.topology.rank)
        self._note(corruption)
        return rows

    def _note(self, corruption: Tensor) -> None:
        """Add corruption to the finding of the last exchange, unless it has one already."""
        finding, state = self._findings[-1]
        first = finding.corruption
        corruption = torch.where(first == FINE, corruption, first)
        self._findings[-1] = replace(finding, corruption=corruption), state

    # -- the comparison of statuses --------------------------------------------------------------

    def agree(self) -> Routine[NonFinite | None]:
        """Compare the findings of this step with those of all ranks.

        Returns None if every gradient holds the mean. Raises `CorruptMessageError` on all ranks
        if any message was corrupt.
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
        """Return the concatenated status messages of all ranks that exchange."""
        topology = self._session.topology
        rank = topology.rank if topology.status_rank is None else topology.status_rank
        answers = yield all_gather(status_of(findings, rank), group="status")
        return torch.cat(list(answers)).cpu()

    # -- the end of a step -----------------------------------------------------------------------

    def commit(self) -> None:
        """End the step and keep its state."""
        session = self._session
        session.counters.end_step()
        session.store.commit()
        session.steps += 1
        session.counters.steps += 1

    def rollback(self) -> None:
        """End the step and leave the state as it was before."""
        self._session.counters.end_step()
        self._session.store.discard()

    def defer(self) -> None:
        """End the step as if nothing had been sent, and keep its input in the residual.

        Use it if the input cannot be computed again, such as an optimizer's updates. If any of it
        is NaN or infinite, the step is rolled back instead, or it would stay there for good.

        Raises `ExchangeError` on all ranks, without changing the state, if the input was lost
        because it arrived corrupt inside a machine.
        """
        if self._lost is not None:
            self.rollback()
            raise ExchangeError(
                f"{self._lost}. The updates of that machine are lost, so the group is broken: "
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

    `options` holds all other settings that must be equal on all ranks. The messages have a fixed
    size, so that ranks can compare them whatever their settings are.
    """
    layout = fingerprint(*(f"{n}:{tuple(p.shape)}:{p.dtype}" for n, p in parameters.items()))
    own = Header(rank, 0, 0, fingerprint(scheme.identity, options), layout, 0)
    compare((yield from gather_headers(own)), own, repr(scheme))


def _with_code(finding: Finding, code: int) -> Finding:
    """Return a leader's finding with a corruption code from inside its machine, if there is one.

    Then the average is corrupt, so it does not show whether the ranks' gradients are finite.
    """
    if code == FINE:
        return finding
    corruption = torch.full_like(finding.corruption, code)
    return replace(finding, corruption=corruption, non_finite=torch.full_like(corruption, FINE))
