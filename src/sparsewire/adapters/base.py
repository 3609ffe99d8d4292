"""The base class of the objects that `attach` returns: counters, reports and saved state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from .. import kernels
from ..counters import Counters
from ..digest import seal, verify
from ..errors import AttachError, SparsewireError, StateError
from ..groups import Alone, drive
from ..groups.connection import Connection
from ..groups.distributed import DistributedGroup, seconds_of
from ..groups.hierarchy import DistributedHierarchy, Hierarchy, IntraNode
from ..groups.thread import ExchangeThread
from ..report import Report, dense_traffic, plural
from ..scheme import AnyScheme
from ..session import Session, Topology, handshake
from ..state import resize


class Attached(ABC):
    """Base of the objects that `attach` returns: the exchange of one model, until `detach`."""

    @property
    @abstractmethod
    def _session(self) -> Session: ...

    @property
    @abstractmethod
    def group(self) -> Connection | Alone:
        """The ranks that take part.

        `group.rank` is this rank's number, and `group.size` is the number of ranks.
        """

    @property
    @abstractmethod
    def error(self) -> SparsewireError | None:
        """The last failure as the original exception, or None."""

    @abstractmethod
    def detach(self) -> None:
        """Stop exchanging. Call it on all ranks."""

    @property
    def scheme(self) -> AnyScheme:
        """The scheme that was attached."""
        return self._session.scheme

    @property
    def counters(self) -> Counters:
        """The running totals behind the reports.

        Set `wire.counters.trace = []` to record every stage with its begin and end.
        """
        return self._session.counters

    @property
    def steps(self) -> int:
        """The number of exchanges so far, including those before a restart."""
        return self._session.steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank must save to resume: plain values and tensors.

        Save it on every rank, with the model and the optimizer. If an exchange of updates is under
        way, this waits for it. The state contains a digest, so that `load_state_dict` detects a
        corrupt file.
        """
        own = self._saved()  # first, since it may wait for an exchange
        local = self._session.topology.local_world_size
        return seal({**self._session.state_dict(), "local_world_size": local, **own})

    def load_state_dict(
        self,
        state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        strict: bool = True,
        *,
        on_world_size_change: Literal["raise", "resize"] = "raise",
    ) -> None:
        """Resume from saved state. It is checked as a whole before anything changes.

        Arguments:
            state: The result of `state_dict` on this rank; or a list of the results on all ranks,
                in the order of the ranks.
            strict: If False, accept the state of another scheme, provided that its memory is of
                the same kind.
            on_world_size_change: `'resize'` accepts a list that was saved by another number of
                ranks, or with another `intra_node`, and distributes it; pass the same list on
                every rank. `'raise'`, the default, refuses it.

        Raises:
            StateError: The state does not fit this scheme, model, rank or number of ranks, or is
                corrupt.
        """
        if on_world_size_change not in ("raise", "resize"):
            raise StateError(
                f"on_world_size_change must be 'raise' or 'resize', not {on_world_size_change!r}"
            )
        if isinstance(state, (list, tuple)):
            if on_world_size_change == "raise":
                raise StateError(
                    f"this is a list of {plural(len(state), 'state')}, and a rank resumes from "
                    f"its own. Pass the state of this rank, or on_world_size_change='resize' to "
                    f"resume with another number of ranks"
                )
            for each in state:
                verify(each)
            _check_together(state)
            place = self._session.place[1], self._session.topology.local_world_size
            is_same = (len(state), state[0]["local_world_size"]) == place
            state = state[self._session.place[0]] if is_same else self._merged(state, strict)
        else:
            verify(state)
        assert isinstance(state, Mapping)
        local, before = self._session.topology.local_world_size, state["local_world_size"]
        if before != local:
            raise StateError(
                f"the state was saved on machines with {plural(before, 'rank')} each, and these "
                f"have {local}. Attach with the same intra_node="
            )
        self._load(state, strict)

    @abstractmethod
    def _saved(self) -> dict[str, Any]:
        """Return the state to save in addition to the session's."""

    @abstractmethod
    def _load(self, state: Mapping[str, Any], strict: bool) -> None:
        """Check and load this rank's state, after its digest was verified."""

    def _merged(self, states: Sequence[Mapping[str, Any]], strict: bool) -> dict[str, Any]:
        """Return this rank's state, merged from the states of another number of ranks.

        Only ranks that exchange have a residual: one rank of each machine.
        """
        session, topology = self._session, self._session.topology
        for each in states:
            session.check_scheme(each, strict)
        memories = [each["memory"] for each in states[:: states[0]["local_world_size"]]]
        place = topology.rank, topology.world_size
        memory = resize(memories, session.scheme.fields, session.shapes, *place)
        rank, world_size = session.place
        return {
            **states[rank % len(states)],
            "rank": rank,
            "world_size": world_size,
            "local_world_size": topology.local_world_size,
            "memory": memory if topology.leads else {name: {} for name in memory},
        }

    def stats(self) -> dict[str, float]:
        """Return the counts of the last step as a flat dictionary of numbers, for any logger.

        It is cheap enough to call at every step: `gradient_norm` is a by-product of the exchange,
        and `memory_norm` is estimated from a sample of the residual. See `report` for totals.
        """
        session, last = self._session, self.counters.last_step
        dense = dense_traffic(last.values, session.topology.world_size, 4)
        return {
            "steps": session.steps,
            "skipped": session.counters.skipped,
            "bytes_sent": last.bytes_sent,
            "bytes_received": last.bytes_received,
            "dense_bytes": dense,
            "reduction": dense / last.bytes_sent if last.bytes_sent else 1.0,
            "selected": int(last.selected),
            "aimed_at": last.aimed_at,
            **{f"seconds_{stage}": seconds for stage, seconds in last.seconds.items()},
            "gradient_norm": math.sqrt(sum(session.counters.gradient_squares.values())),
            "memory_norm": session.store.estimated_norm(),
        }

    def report(self, layers: bool = False) -> Report:
        """Return running totals: bytes, ratios, times and the norm of the residual.

        Arguments:
            layers: If True, list the norms by parameter as well.
        """
        return self._session.report(layers)


def _check_together(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless these are the states of all ranks at one step, in order."""
    if not states:
        raise StateError("the list of states is empty. Pass the states of all ranks that saved one")
    for rank, state in enumerate(states):
        if (state.get("rank"), state.get("world_size")) != (rank, len(states)):
            raise StateError(
                f"number {rank} of the list is the state of rank {state.get('rank')} of "
                f"{state.get('world_size')}, and the list has {len(states)}. Pass the states of "
                f"all ranks of one checkpoint, in the order of the ranks"
            )
        for key in ("identity", "step", "local_world_size", "scaling"):
            if state.get(key) != states[0].get(key):
                raise StateError(
                    f"the states of ranks 0 and {rank} differ in {key} ({states[0].get(key)} and "
                    f"{state.get(key)}). Pass states of one checkpoint"
                )


@dataclass(frozen=True)
class Meeting:
    """The groups of one exchange, and this rank's position in them."""

    group: Connection | Alone
    hierarchy: Hierarchy | None
    topology: Topology

    @property
    def driver(self) -> Connection | Hierarchy | Alone:
        """The driver that carries out requests."""
        return self.hierarchy or self.group

    def close(self) -> None:
        """Leave all groups."""
        for group in (self.group, self.hierarchy):
            if isinstance(group, (DistributedGroup, DistributedHierarchy)):
                group.close()


def leave(thread: ExchangeThread, meeting: Meeting) -> None:
    """Stop the threads of an exchange, and return its groups for reuse."""
    thread.stop()
    if thread.broken is None:
        meeting.close()


def meet(
    process_group: dist.ProcessGroup | None,
    scheme: AnyScheme,
    parameters: Mapping[str, nn.Parameter],
    options: str,
    timeout: float | timedelta,
    intra_node: IntraNode | None,
    intra_node_dtype: torch.dtype | None,
    alone: bool = False,
) -> Meeting:
    """Make the groups of an exchange, and compare the ranks' schemes, options and models."""
    seconds = seconds_of(timeout)
    _check_dtype(intra_node, intra_node_dtype)
    device = next(iter(parameters.values())).device
    kernels.prepare(device.type)  # before the ranks meet, or the others would wait
    if alone:
        return Meeting(Alone(), None, Topology())
    group = DistributedGroup(process_group, seconds, device)
    options = f"{options} {intra_node is None} {intra_node_dtype}"
    drive(handshake(group.rank, scheme, parameters, options), group, Counters())
    if intra_node is None:
        return Meeting(group, None, Topology(group.rank, group.size))
    hierarchy = DistributedHierarchy(intra_node, intra_node_dtype, group, device)
    topology = Topology(
        hierarchy.rank,
        hierarchy.size,
        hierarchy.local_rank,
        hierarchy.local_world_size,
        intra_node_dtype,
    )
    return Meeting(group, hierarchy, topology)


def _check_dtype(intra_node: IntraNode | None, dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    if intra_node is None:
        raise AttachError(
            "intra_node_dtype is the type of the sums inside a machine, and intra_node is not "
            "given. Pass intra_node= as well"
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise AttachError(
            f"intra_node_dtype must be a floating-point type such as torch.bfloat16, not {dtype!r}"
        )
