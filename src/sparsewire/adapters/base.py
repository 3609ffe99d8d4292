"""What `attach` returns, whatever is exchanged: numbers to read, and what a checkpoint needs."""

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
from ..groups.distributed import DistributedGroup, seconds_of
from ..groups.hierarchy import Hierarchy, IntraNode
from ..groups.thread import ExchangeThread
from ..report import Report, dense_traffic, plural
from ..scheme import AnyScheme
from ..session import Session, Topology, handshake
from ..state import resize


class Attached(ABC):
    """The exchange of one model, which goes on until `detach`."""

    @property
    @abstractmethod
    def _session(self) -> Session: ...

    @property
    @abstractmethod
    def group(self) -> DistributedGroup | Alone:
        """All ranks that take part."""

    @property
    @abstractmethod
    def error(self) -> SparsewireError | None:
        """The last failure in full."""

    @abstractmethod
    def detach(self) -> None:
        """Take the exchange away from the model. Call it on all ranks."""

    @property
    def scheme(self) -> AnyScheme:
        """What was attached."""
        return self._session.scheme

    @property
    def counters(self) -> Counters:
        """What the exchange counts, to read."""
        return self._session.counters

    @property
    def steps(self) -> int:
        """Exchanges so far, those before a restart included."""
        return self._session.steps

    def state_dict(self) -> dict[str, Any]:
        """What this rank must save, beside model and optimizer, to go on as if never stopped.

        An exchange of updates that is under way ends first.
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
        """Go on from saved state, checked as a whole before anything changes.

        Arguments:
            state: what `state_dict` returned on this rank; or a list of what it returned on all
                ranks, in their order.
            strict: False lets another scheme in, if its memory is of the same kind.
            on_world_size_change: another number of ranks than saved the state may 'resize' it, for
                which all of them need the list.
        """
        if on_world_size_change not in ("raise", "resize"):
            raise StateError(
                f"on_world_size_change is 'raise' or 'resize', not {on_world_size_change!r}"
            )
        if isinstance(state, (list, tuple)):
            if on_world_size_change == "raise":
                raise StateError(
                    f"this is a list of {plural(len(state), 'state')}: pass the one of this rank, "
                    f"or on_world_size_change='resize' to let another number of ranks go on"
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
                f"the saved state is of machines with {plural(before, 'rank')} each, and here they "
                f"have {local}: attach with the same intra_node="
            )
        self._load(state, strict)

    @abstractmethod
    def _saved(self) -> dict[str, Any]:
        """What is saved beside the state of the session."""

    @abstractmethod
    def _load(self, state: Mapping[str, Any], strict: bool) -> None:
        """Take over this rank's state, which is as it was saved, once it is seen to fit."""

    def _merged(self, states: Sequence[Mapping[str, Any]], strict: bool) -> dict[str, Any]:
        """Return what this rank goes on with, from what all ranks of another number saved.

        Only ranks that exchange keep a memory, of which there is one for each machine.
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

        Cheap enough to call at every step: `gradient_norm` comes from what the exchange computed,
        and `memory_norm` is estimated from a sample of the memory. `report()` has running totals.
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
        """Running totals: bytes, ratios, times and the health of the memory.

        With `layers=True` the norms are also listed by parameter.
        """
        return self._session.report(layers)


def _check_together(states: Sequence[Mapping[str, Any]]) -> None:
    """Refuse states that are not those of all ranks at one step, in order."""
    if not states:
        raise StateError("the list of states is empty: pass those of all ranks that saved one")
    for rank, state in enumerate(states):
        if (state.get("rank"), state.get("world_size")) != (rank, len(states)):
            raise StateError(
                f"number {rank} of the list is the state of rank {state.get('rank')} of "
                f"{state.get('world_size')}, and the list has {len(states)}: pass the states of "
                f"all ranks of one checkpoint, in their order"
            )
        for key in ("identity", "step", "local_world_size", "scaling"):
            if state.get(key) != states[0].get(key):
                raise StateError(
                    f"the states of ranks 0 and {rank} differ in {key} ({states[0].get(key)} and "
                    f"{state.get(key)}): pass those of one checkpoint"
                )


@dataclass(frozen=True)
class Meeting:
    """The ranks that exchange: all of them, and this one's place among them."""

    group: DistributedGroup | Alone
    hierarchy: Hierarchy | None
    topology: Topology

    @property
    def driver(self) -> DistributedGroup | Hierarchy | Alone:
        """Who carries requests."""
        return self.hierarchy or self.group

    def close(self) -> None:
        """Leave all groups."""
        for group in (self.group, self.hierarchy):
            if isinstance(group, (DistributedGroup, Hierarchy)):
                group.close()


def leave(thread: ExchangeThread, meeting: Meeting) -> None:
    """Stop the threads of an exchange, and leave its groups to the next one."""
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
    """Bring the ranks together, and make sure that they all want the same."""
    seconds = seconds_of(timeout)
    _check_dtype(intra_node, intra_node_dtype)
    device = next(iter(parameters.values())).device
    kernels.prepare(device.type)  # before the ranks meet, who would wait for it
    if alone:
        return Meeting(Alone(), None, Topology())
    group = DistributedGroup(process_group, seconds, device)
    options = f"{options} {intra_node is None} {intra_node_dtype}"
    drive(handshake(group.rank, scheme, parameters, options), group, Counters())
    if intra_node is None:
        return Meeting(group, None, Topology(group.rank, group.size))
    hierarchy = Hierarchy(intra_node, intra_node_dtype, group, device)
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
            "intra_node_dtype says how a machine adds up, and no machine is given: pass intra_node"
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise AttachError(
            f"intra_node_dtype is a floating-point type, such as torch.bfloat16, not {dtype!r}"
        )
