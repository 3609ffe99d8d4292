"""Ranks that share a machine exchange densely among themselves; one of them represents all of them.

The first rank of a machine is the leader. The gradients of a machine are averaged over the fast
links inside it. Only the leader exchanges that average with the leaders of the other machines, and
it sends the mean to the ranks of its machine.
"""

from __future__ import annotations

import datetime
import os
import weakref
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import AttachError, ExchangeError
from ..report import plural
from ..requests import Request, all_gather
from .connection import Connection, Ticket
from .distributed import DistributedGroup

IntraNode = dist.ProcessGroup | DeviceMesh | int | Literal["local"]

# Groups that are free again, for each division of the ranks into machines and each deadline.
_Pair = tuple[dist.ProcessGroup, dist.ProcessGroup]
_spares: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, dict[int, _Pair]]] = (
    weakref.WeakKeyDictionary()
)


class Hierarchy:
    """The groups of one rank: its machine, all leaders (if it is one), and all ranks.

    Requests to 'intra_node' stay inside the machine, requests to 'everyone' go to all ranks, and
    all others go to the leaders.

    Arguments:
        rank, size: The number of this machine, and the number of machines.
        inside, leaders, everyone: The three groups. Only leaders have `leaders`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        inside: Connection,
        leaders: Connection | None,
        everyone: Connection,
    ) -> None:
        self.rank = rank
        self.size = size
        self._inside = inside
        self._leaders = leaders
        self._everyone = everyone

    @property
    def doing(self) -> str:
        """The operation under way, as error messages name it."""
        return self._inside.doing

    @doing.setter
    def doing(self, what: str) -> None:
        self._inside.doing = what

    def start(self, request: Request) -> tuple[Connection, Ticket]:
        """Begin a request in the group that it names."""
        special = {"intra_node": self._inside, "everyone": self._everyone}
        group = special.get(request.group, self._leaders)
        assert group is not None, "only leaders exchange"
        return group, group.start(request)

    def wait(self, ticket: tuple[Connection, Ticket]) -> Any:
        """Wait until a request has ended, and return its answer."""
        group, inner = ticket
        return group.wait(inner)

    def abandon(self, error: ExchangeError) -> None:
        """Refuse every later request, and tell all ranks why."""
        self._everyone.abandon(error)


class DistributedHierarchy(Hierarchy):
    """A hierarchy over process groups, which all ranks create together.

    Arguments:
        intra_node: The ranks of this machine; see `attach`.
        dtype: The type of the sums inside a machine. If None, the gradient's type.
        everyone: The group of all ranks. All of them must make the hierarchy.
        device: The device of the gradients.
    """

    def __init__(
        self,
        intra_node: IntraNode,
        dtype: torch.dtype | None,
        everyone: DistributedGroup,
        device: torch.device,
    ) -> None:
        if dtype is not None:
            _try(dtype, device)
        nodes = _share_out(_members(intra_node, everyone), everyone)
        world_size = dist.group.WORLD
        assert isinstance(world_size, dist.ProcessGroup)
        timeout = everyone.timeout
        key = (tuple(map(tuple, nodes)), timeout)
        self._spare = _spares.setdefault(world_size, {}).setdefault(key, {})
        self._made = everyone.find_common("pairs", self._spare) or everyone.meeting
        spare = self._spare.pop(self._made, None)
        self._pair = spare or everyone.limited(lambda: _make_groups(nodes, timeout))
        machine = next(n for n, ranks in enumerate(nodes) if dist.get_rank() in ranks)
        self.local_world_size = len(nodes[0])
        inside = DistributedGroup(self._pair[0], timeout, device, _part_of=everyone)
        self.local_rank = inside.rank
        leaders = None
        if self.local_rank == 0:
            leaders = DistributedGroup(self._pair[1], timeout, device, _part_of=everyone)
        self._own = [inside] if leaders is None else [inside, leaders]
        super().__init__(machine, len(nodes), inside, leaders, everyone)

    def close(self) -> None:
        """Leave the groups of this hierarchy. The next hierarchy of the same ranks reuses them."""
        for group in self._own:
            group.close()
        self._spare[self._made] = self._pair


def _try(dtype: torch.dtype, device: torch.device) -> None:
    probe = torch.zeros(1, dtype=dtype, device=device)
    try:
        torch.mul(probe, 0.5).add_(probe)
    except RuntimeError as error:
        raise AttachError(
            f"{dtype} cannot be summed on {device.type}: leave intra_node_dtype out"
        ) from error


def _members(intra_node: IntraNode, everyone: DistributedGroup) -> list[int]:
    """Return the global ranks of this machine, from any form of `intra_node`."""
    if isinstance(intra_node, DeviceMesh):
        if intra_node.ndim != 1:
            raise AttachError(
                f"intra_node takes one dimension of a mesh, and this one has {intra_node.ndim}: "
                f"write intra_node=mesh['local'] with the name of the one inside a machine"
            )
        intra_node = intra_node.get_group()
    if isinstance(intra_node, dist.ProcessGroup):
        return dist.get_process_group_ranks(intra_node)
    size = intra_node
    if size == "local":
        text = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not text.isdigit():
            raise AttachError(
                "intra_node='local' takes the number of ranks on a machine from LOCAL_WORLD_SIZE, "
                "which torchrun sets and which is not set here: write it, as intra_node=8"
            )
        size = int(text)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or everyone.size % size:
        raise AttachError(
            f"intra_node={size!r} makes no sense for {plural(everyone.size, 'rank')}: it is the "
            f"number of ranks on every machine, a process group of them, one dimension of a "
            f"DeviceMesh, or 'local'"
        )
    first = everyone.rank // size * size
    return everyone.members[first : first + size]


def _share_out(mine: list[int], everyone: DistributedGroup) -> list[list[int]]:
    """Return all machines as their global ranks. Raise unless they divide the ranks evenly."""
    if everyone.size != dist.get_world_size():
        raise AttachError(
            "intra_node= needs a model over all ranks, because all of them must make the groups"
        )
    row = torch.full((everyone.size,), -1)
    row[: len(mine)] = torch.tensor(mine)
    answers = everyone.wait(everyone.start(all_gather(row.view(torch.uint8))))
    rows = [answer.cpu().view(torch.int64).tolist() for answer in answers]
    nodes = sorted({tuple(rank for rank in row if rank >= 0) for row in rows})
    if len({len(node) for node in nodes}) > 1 or sum(map(len, nodes)) != everyone.size:
        raise AttachError(
            f"the machines given by intra_node= do not divide the model's {everyone.size} ranks "
            f"evenly: every rank must be on one machine, and all machines must have equally many"
        )
    return [list(node) for node in nodes]


def _make_groups(nodes: list[list[int]], timeout: float) -> _Pair:
    """Create the group of this machine's ranks, and the group of ranks with its local rank.

    All ranks create all groups in the same order and belong to the same number of them, because
    torch derives the names of groups from that.
    """
    limit = datetime.timedelta(seconds=timeout)
    own: list[dist.ProcessGroup] = []
    for sets in (nodes, [list(place) for place in zip(*nodes, strict=True)]):
        for ranks in sets:
            group = dist.new_group(ranks, timeout=limit, group_desc="sparsewire")
            if dist.get_rank() in ranks:
                assert isinstance(group, dist.ProcessGroup)
                own.append(group)
    return own[0], own[1]
