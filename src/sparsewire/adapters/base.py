"""What `attach` returns, whatever is exchanged: numbers to read, and what a checkpoint needs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import kernels
from ..counters import Counters
from ..errors import AttachError, SparsewireError, StateError
from ..groups import Alone, drive
from ..groups.distributed import DistributedGroup, seconds_of
from ..groups.hierarchy import Hierarchy, IntraNode
from ..report import Report, dense_traffic, plural
from ..scheme import AnyScheme
from ..session import Session, Topology, handshake


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
        """What this rank must save to go on later as if it had never stopped."""
        local = self._session.topology.local_world_size
        return {**self._session.state_dict(), "local_world_size": local}

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Go on from saved state, checked as a whole before anything changes.

        With `strict=False` the scheme may be another one, if its memory is of the same kind.
        """

    def _check(self, state: Mapping[str, Any], strict: bool) -> None:
        self._session.check(state, strict)
        local, before = self._session.topology.local_world_size, state.get("local_world_size", 1)
        if before != local:
            raise StateError(
                f"the saved state is of machines with {plural(before, 'rank')} each, and here they "
                f"have {local}: attach with the same intra_node="
            )

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
